"""An API that is killed, or hangs, changes nothing for the engine."""

from __future__ import annotations

from tests.crash.cases import find
from tests.crash.conftest import Survives


def test_an_api_that_is_killed_or_hangs_changes_no_result(survives: Survives) -> None:
    verdict = survives(find("the API is killed and hangs"))

    assert "answers" in verdict.notes[0] and not verdict.notes[0].startswith("0 ")

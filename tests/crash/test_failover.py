"""The commits that a promoted standby has."""

from __future__ import annotations

from tests.crash.cases import find
from tests.crash.conftest import Survives


def test_file_is_read_again_after_failover_to_an_asynchronous_standby(survives: Survives) -> None:
    verdict = survives(find("failover to a standby", "asynchronous"))

    assert any("lacked" in note for note in verdict.notes)


def test_synchronous_standby_has_everything_that_was_committed(survives: Survives) -> None:
    survives(find("failover to a standby", "synchronous"))

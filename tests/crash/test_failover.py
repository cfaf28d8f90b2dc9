"""What a standby that becomes the primary has of what was committed."""

from __future__ import annotations

from tests.crash.cases import find
from tests.crash.conftest import Survives


def test_asynchronous_standby_lacks_what_was_committed_and_a_file_is_read_again(survives: Survives) -> None:
    verdict = survives(find("failover to a standby", "asynchronous"))

    assert any("lacked" in note for note in verdict.notes)


def test_synchronous_standby_has_everything_that_was_committed(survives: Survives) -> None:
    survives(find("failover to a standby", "synchronous"))

"""A graph that is changed in place and corrected, and SIGKILL meanwhile. All points: `make crash ONLY=commands`."""

from __future__ import annotations

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.live import live_case
from tests.crash.conftest import Survives
from tests.crash.test_panes import with_canary


def test_killed_commands_and_workers_change_and_correct_once(survives: Survives) -> None:
    case = with_canary(
        live_case(Failpoint.AFTER_FENCE),
        "UPDATE live.minutes SET n = n + 1 WHERE device = 'd1' AND window_start = to_timestamp(0)",
        "DELETE FROM mill.corrections WHERE late_record_id IS NULL",
        "UPDATE mill.late_records SET state = 'open' WHERE late_record_id = 1",
    )

    verdict = survives(case)

    assert (verdict.kills, verdict.idle_kills) == (4, 0)

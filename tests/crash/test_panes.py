"""Early panes, users' windows, bounded and stored sessions, histories and tools per key under SIGKILL; canaries.

All points: `make crash ONLY=early`, `ONLY="own windows"`, `ONLY="sessions in"`, `ONLY="tools per key"`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import psycopg

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.early import early_case
from tests.crash.cases.panes import pane_case
from tests.crash.cases.sessions import session_case
from tests.crash.cases.tools import tool_case
from tests.crash.checks import Fault
from tests.crash.conftest import Survives
from tests.crash.world import Case, World


def with_canary(case: Case, *damages: str) -> Case:
    """Return a case whose checker must find nothing, and then, after each damage, one more fault."""

    def run(world: World) -> None:
        case.run(world)
        assert world.oracle is not None
        check = world.oracle
        world.oracle = lambda: check() or blind(check, world.url)

    def blind(check: Callable[[], list[Fault]], url: str) -> list[Fault]:
        missed, before = [], 0
        for damage in damages:
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(damage)  # type: ignore[call-overload]
            found = len(check())
            if found <= before:
                missed.append(Fault("violation", f"the checker does not see: {damage}"))
            before = found
        return missed

    return replace(case, run=run)


def test_no_kill_loses_or_doubles_an_early_pane(survives: Survives) -> None:
    case = with_canary(
        early_case(Failpoint.AFTER_COMMIT),
        "DELETE FROM early.fixed_discarding WHERE device = 'd1' AND window_start = to_timestamp(0)",
        "UPDATE early.totals_retracting SET n = n + 1 WHERE window_start = to_timestamp(0)",
        "UPDATE early.sliding_accumulating SET total = 0 WHERE window_start = to_timestamp(0)",
        "DELETE FROM early.fixed_retracting_history WHERE pane_index = 0 AND is_retraction",
    )

    assert survives(case).kills == 1


def test_no_kill_changes_own_windows_or_a_history(survives: Survives) -> None:
    case = with_canary(
        pane_case(Failpoint.AFTER_FENCE),
        "DELETE FROM panes.shifts_history WHERE device = 'd1' AND pane_index = 0 AND is_retraction",
        "UPDATE panes.large_history SET total = total + 1000 WHERE device = 'd1'",
        "UPDATE panes.full SET n = n + 1 WHERE device = 'd99'",
        "DELETE FROM panes.closing WHERE device = 'd1'",
        "DELETE FROM panes.visits_history WHERE NOT is_retraction AND (device, window_start, pane_index) IN"
        " (SELECT device, window_start, pane_index FROM panes.visits)",
        "UPDATE panes.most_history SET pane_last = NOT pane_last WHERE device = 'd2'",
    )

    assert survives(case).kills == 1


def test_no_kill_changes_sessions_in_the_database(survives: Survives) -> None:
    case = with_canary(
        session_case(Failpoint.AFTER_COMMIT),
        "DELETE FROM stays.plain_history WHERE pane_index = 0 AND is_retraction",
        "DELETE FROM stays.plain WHERE device = 'd1'",
        "UPDATE stays.cut SET total = total + 1 WHERE device = 'd1'",
        "UPDATE stays.full SET window_end = window_end + interval '1 us' WHERE device = 'd1'",
    )

    assert survives(case).kills == 1


def test_no_kill_changes_what_tools_per_key_find(survives: Survives) -> None:
    case = with_canary(
        tool_case(Failpoint.AFTER_STEP),
        "DELETE FROM tools.absent WHERE device = 'd1'",
        "UPDATE tools.rates SET increase = increase + 1 WHERE device = 'd1'",
        "UPDATE tools.grid_linear SET value = value + 1 WHERE device = 'd1'",
        "UPDATE tools.top SET top = '[]' WHERE window_start = (SELECT min(window_start) FROM tools.top)",
    )

    assert survives(case).kills == 1

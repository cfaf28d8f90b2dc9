"""The verdicts of a crash test, and what it leaves undecided."""

from __future__ import annotations

from dataclasses import replace

from millpy.testing.crash_test.compare import ComparedTable, Results, RowChange
from millpy.testing.crash_test.verdict import CrashVerdict, Judgment, judge

ROWS = [("a", 0, 3, 1.5), ("a", 60, 2, 2.0), ("b", 0, 1, 9.0)]
DRAWN = [("a", 0, 3, 0.1), ("a", 60, 2, 0.2), ("b", 0, 1, 0.3)]


def results(rows: list[tuple], **others: object) -> Results:
    table = ComparedTable("per_minute", ("device", "window_start"), ("n", "mean"), rows)
    return replace(Results({"per_minute": table}, injected=6), **others)  # type: ignore[arg-type]


def judged(first: list[tuple], second: list[tuple], run: list[tuple], **others: object) -> CrashVerdict:
    return judge(results(first), results(second), results(run, **others), fed=6)


def test_equal_results_pass() -> None:
    verdict = judged(ROWS, ROWS, ROWS[::-1])

    assert (verdict.judgment, verdict.passed) == (Judgment.EXACT, True)
    assert verdict.compared == {"per_minute": 3}


def test_change_by_faults_alone_fails() -> None:
    verdict = judged(ROWS, ROWS, [("a", 0, 4, 1.5), ROWS[1]])

    assert (verdict.judgment, verdict.passed) == (Judgment.DIFFERENT, False)
    assert [verdict.count(change) for change in RowChange] == [1, 0, 1]


def test_column_that_differs_between_references_is_not_blamed_on_faults() -> None:
    verdict = judged(ROWS, DRAWN, [(*row[:3], 0.5) for row in ROWS])

    assert (verdict.judgment, verdict.found, verdict.passed) == (Judgment.UNSTEADY, [], False)
    assert verdict.unsteady["per_minute"].columns == {"mean"}


def test_other_columns_of_an_unsteady_table_are_still_judged() -> None:
    verdict = judged(ROWS, DRAWN, [("a", 0, 6, 0.5), *ROWS[1:]])

    assert verdict.judgment is Judgment.DIFFERENT
    assert [difference.columns for difference in verdict.found] == [("n",)]


def test_table_with_unstable_rows_is_undecided() -> None:
    verdict = judged(ROWS, ROWS[1:], ROWS[:1])

    assert (verdict.judgment, verdict.found) == (Judgment.UNSTEADY, [])
    assert len(verdict.undecided) == 2


def test_records_that_were_never_read_fail_even_when_results_are_equal() -> None:
    verdict = judged(ROWS, ROWS, ROWS, injected=5)

    assert verdict.judgment is Judgment.DIFFERENT
    assert verdict.faults == ["5 records were read of 6 that were fed"]


def test_accounting_and_duplicates_are_judged() -> None:
    assert judged(ROWS, ROWS, ROWS, unbalanced=("readings",)).judgment is Judgment.DIFFERENT
    assert judged(ROWS, ROWS, ROWS, duplicates=1).judgment is Judgment.DIFFERENT
    assert judged(ROWS, ROWS, ROWS, dead_lettered=1).judgment is Judgment.DIFFERENT


def test_unfinished_run_is_reported_first() -> None:
    verdict = judge(results(ROWS), results(ROWS), results(ROWS[:1]), fed=6, stuck="nothing moves")

    assert (verdict.judgment, verdict.faults[0]) == (Judgment.STUCK, "nothing moves")
    assert verdict.count(RowChange.LOST) == 2


def test_redelivery_by_a_broker_is_not_blamed_on_faults() -> None:
    dead = ComparedTable("dead letters", (), ("stream", "payload"), [("readings", b"rubbish")])
    first = replace(results(ROWS, injected=7, dead_lettered=1), tables={**results(ROWS).tables, "dead letters": dead})
    again = replace(dead, rows=[*dead.rows, *dead.rows])
    run = replace(first, tables={**first.tables, "dead letters": again}, injected=11, duplicates=3, dead_lettered=2)

    assert judge(first, first, run, fed=7, redelivers=True).judgment is Judgment.EXACT
    assert judge(first, first, run, fed=7).judgment is Judgment.DIFFERENT
    lost = replace(run, injected=10)
    assert judge(first, first, lost, fed=7, redelivers=True).faults == ["5 records were accepted instead of 6"]

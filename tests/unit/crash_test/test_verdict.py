"""What a crash test concludes, and what it leaves undecided."""

from __future__ import annotations

from dataclasses import replace

from millpy.testing.crash_test.compare import Change, Results, ResultTable
from millpy.testing.crash_test.verdict import Judgement, Verdict, judge

ROWS = [("a", 0, 3, 1.5), ("a", 60, 2, 2.0), ("b", 0, 1, 9.0)]
DRAWN = [("a", 0, 3, 0.1), ("a", 60, 2, 0.2), ("b", 0, 1, 0.3)]


def results(rows: list[tuple], **others: object) -> Results:
    table = ResultTable("per_minute", ("device", "window_start"), ("n", "mean"), rows)
    return replace(Results({"per_minute": table}, injected=6), **others)  # type: ignore[arg-type]


def judged(first: list[tuple], second: list[tuple], run: list[tuple], **others: object) -> Verdict:
    return judge(results(first), results(second), results(run, **others), fed=6)


def test_equal_results_pass() -> None:
    verdict = judged(ROWS, ROWS, ROWS[::-1])

    assert (verdict.judgement, verdict.passed) == (Judgement.EXACT, True)
    assert verdict.compared == {"per_minute": 3}


def test_what_only_the_faults_change_fails() -> None:
    verdict = judged(ROWS, ROWS, [("a", 0, 4, 1.5), ROWS[1]])

    assert (verdict.judgement, verdict.passed) == (Judgement.DIFFERENT, False)
    assert [verdict.count(change) for change in Change] == [1, 0, 1]


def test_column_that_references_disagree_about_is_not_held_against_the_faults() -> None:
    verdict = judged(ROWS, DRAWN, [(*row[:3], 0.5) for row in ROWS])

    assert (verdict.judgement, verdict.found, verdict.passed) == (Judgement.UNSTEADY, [], False)
    assert verdict.unsteady["per_minute"].columns == {"mean"}


def test_other_columns_of_an_unsteady_table_are_still_held_to() -> None:
    verdict = judged(ROWS, DRAWN, [("a", 0, 6, 0.5), *ROWS[1:]])

    assert verdict.judgement is Judgement.DIFFERENT
    assert [difference.columns for difference in verdict.found] == [("n",)]


def test_table_whose_rows_come_and_go_cannot_be_decided() -> None:
    verdict = judged(ROWS, ROWS[1:], ROWS[:1])

    assert (verdict.judgement, verdict.found) == (Judgement.UNSTEADY, [])
    assert len(verdict.undecided) == 2


def test_records_that_were_never_read_fail_even_when_results_are_equal() -> None:
    verdict = judged(ROWS, ROWS, ROWS, injected=5)

    assert verdict.judgement is Judgement.DIFFERENT
    assert verdict.faults == ["5 records were read of 6 that were fed"]


def test_accounting_and_duplicates_are_held_to() -> None:
    assert judged(ROWS, ROWS, ROWS, unbalanced=("readings",)).judgement is Judgement.DIFFERENT
    assert judged(ROWS, ROWS, ROWS, duplicates=1).judgement is Judgement.DIFFERENT
    assert judged(ROWS, ROWS, ROWS, dead_lettered=1).judgement is Judgement.DIFFERENT


def test_run_that_does_not_finish_says_so_first() -> None:
    verdict = judge(results(ROWS), results(ROWS), results(ROWS[:1]), fed=6, stuck="nothing moves")

    assert (verdict.judgement, verdict.faults[0]) == (Judgement.STUCK, "nothing moves")
    assert verdict.count(Change.LOST) == 2


def test_what_a_broker_delivers_again_is_not_held_against_the_faults() -> None:
    dead = ResultTable("dead letters", (), ("stream", "payload"), [("readings", b"rubbish")])
    first = replace(results(ROWS, injected=7, dead_lettered=1), tables={**results(ROWS).tables, "dead letters": dead})
    again = replace(dead, rows=[*dead.rows, *dead.rows])
    run = replace(first, tables={**first.tables, "dead letters": again}, injected=11, duplicates=3, dead_lettered=2)

    assert judge(first, first, run, fed=7, redelivers=True).judgement is Judgement.EXACT
    assert judge(first, first, run, fed=7).judgement is Judgement.DIFFERENT
    lost = replace(run, injected=10)
    assert judge(first, first, lost, fed=7, redelivers=True).faults == ["5 records were accepted instead of 6"]

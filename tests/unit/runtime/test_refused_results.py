"""The wait for a result table that refuses turns: growing delays, events at growing intervals."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

from millpy.errors import ResultTableError
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, Grant, ResultRows, StatementRows
from millpy.model.time import INSTANT_MIN
from millpy.runtime.refused_results import RETRY_S_MAX, RefusedResults
from millpy.testing.clock import ManualClock

GONE = ResultTableError("no such table", table="counts", hint="create it")


def refusals() -> tuple[RefusedResults, ManualClock, list[tuple[str, dict[str, Any]]]]:
    told: list[tuple[str, dict[str, Any]]] = []
    clock, ids = ManualClock(), {"counts": 3, "others": 4}
    refused = RefusedResults(ids, Limits(), clock, random.Random(1), lambda kind, detail: told.append((kind, detail)))
    return refused, clock, told


def writing(table_id: int | None = None, sink: str | None = None) -> list[Checkpoint]:
    rows = [] if table_id is None else [ResultRows(table_id, [[1]], 1, True)]
    statements = [] if sink is None else [StatementRows(sink, [("1",)])]
    return [Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, results=rows, statements=statements)]


def test_delays_grow_to_a_minute_and_begin_anew_when_the_table_is_written() -> None:
    refused, clock, _ = refusals()
    delays = []
    for _ in range(20):
        delays.append(refused.refused(GONE))
        clock.advance(delays[-1])
        refused.committed(writing(4, "counts_of_a_sink"))  # says nothing about the table
    assert 0.05 <= delays[0] <= 0.1
    assert all(RETRY_S_MAX / 2 <= delay <= RETRY_S_MAX for delay in delays[-5:])

    refused.committed(writing(3))
    assert refused.refused(GONE) <= 0.1


def test_refusal_is_told_at_growing_intervals_and_then_that_it_is_over() -> None:
    refused, clock, told = refusals()
    moments = []
    for _ in range(24 * 60):
        count = len(told)
        refused.refused(GONE)
        if len(told) > count:
            moments.append(round(clock.monotonic() / 60))
        clock.advance(60.0)
    assert moments[:8] == [0, 1, 2, 4, 8, 16, 32, 64]
    assert {later - sooner for sooner, later in pairwise(moments[8:])} == {60}
    kind, detail = told[0]
    assert (kind, detail["table"], detail["why"], detail["hint"]) == (
        "results_refused", "counts", "no such table", "create it"
    )  # fmt: skip

    refused.committed(writing(3))
    refused.committed(writing(3))
    assert [kind for kind, _ in told[len(moments) :]] == ["results_written"]
    assert told[-1][1]["attempts"] == 24 * 60


def test_each_of_several_refusals_is_over_when_its_own_table_is_written() -> None:
    refused, _, told = refusals()
    for table in ("counts", "others", "to_app"):
        refused.refused(ResultTableError("no such table", table=table))
    refused.committed(writing(4))
    refused.committed([*writing(3), *writing(sink="to_app")])
    assert [(kind, detail["table"]) for kind, detail in told[3:]] == [
        ("results_written", "others"), ("results_written", "counts"), ("results_written", "to_app")
    ]  # fmt: skip


def test_sink_is_over_when_its_statement_has_run() -> None:
    refused, _, told = refusals()
    refused.refused(ResultTableError("cannot run", table="to_app"))
    refused.committed(writing(3))
    assert len(told) == 1
    refused.committed(writing(sink="to_app"))
    assert told[-1][0] == "results_written"

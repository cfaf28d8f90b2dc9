"""A new generation gets the rows of finished windows of the current one, once, however often the copy is killed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg
import pytest

from millpy import hours
from millpy.errors import GraphError, UsageError
from millpy.model.checkpoint import LateRows
from millpy.model.copied_results import copies_between
from millpy.model.deployment import ColumnSpec, GraphSpec
from millpy.model.time import Instant, describe
from millpy.store.postgres.deployment import copied_results
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph
from tests.conformance.test_retention import HOUR, at_hour, reach, store_at
from tests.crash.graph_files import rows

HIGH = ColumnSpec("high", "double precision", True)
LABEL = ColumnSpec("label", "text", True)
TOTAL = ColumnSpec("total", "double precision", True)
FOUND = "SELECT device, extract(epoch FROM window_end)::int / 3600, total, high FROM {}.sums_1m ORDER BY 1, 2"


def second(*values: ColumnSpec, retention_us: int | None = None, **changes: Any) -> GraphSpec:
    """The next generation, with other values in its windowed table."""
    graph = a_graph(intervals=3)
    sums, alarms = graph.tables
    sums = replace(sums, values=values or (HIGH, TOTAL), retention_us=retention_us, **changes)
    return replace(graph, generation=2, tables=(sums, alarms))


async def test_rows_of_closed_windows_are_copied_once_by_a_copy_that_is_killed_and_goes_on(
    owner: Owner, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in "abc":
        await store_at(owner, *range(1, 8), device=device)
    spec, pieces = second(), 0
    later = {"input_watermark": Instant(6 * HOUR), "low_watermark": Instant(4 * HOUR)}
    await owner.commit(*(owner.checkpoint(i, **later) for i in owner.deployment.intervals_of("sums")))
    (plan,) = await owner.store.plan_copies(spec)  # type: ignore[attr-defined]
    assert plan.closed_end == 4 * HOUR, "panes of the later windows wait"
    await reach(owner, 6)
    monkeypatch.setattr(copied_results, "ROWS", 6)

    (plan,) = await owner.store.plan_copies(spec)  # type: ignore[attr-defined]
    assert str(plan) == f"sums_1m gets the rows of windows that end by {describe(plan.closed_end)}; " + (
        "NULL in high; without label"
    )
    for _ in range(100):
        async with PostgresStore(database_url) as store:  # each process is killed in its second piece
            deployment = await store.deploy(spec, on_purpose=True, copy_results=True)
            with pytest.raises(RuntimeError):
                async with store._as_owner("", "") as connection:
                    await copied_results.copy_piece(connection, spec, deployment.graph_id, {})
                    raise RuntimeError
            assert len(await store.plan_copies(spec)) == (pieces < 3)
            if pieces < 3:
                with pytest.raises(GraphError, match="generation 2 has not got all rows of sums_1m yet"):
                    await store.switch("factory", 2, behind_us_max=2**62)
            if await store.copy_results(spec, deployment.graph_id) is None:
                break
            pieces += 1

    whole = [(device, hour, float(hour), None) for device in "abc" for hour in range(1, 7)]
    assert pieces == 3  # of two ends each
    async with PostgresStore(database_url) as store:
        assert await store.switch("factory", 2, behind_us_max=2**62, dry_run=True) is not None
    assert rows(database_url, FOUND.format("factory_2")) == whole
    assert rows(database_url, "SELECT bool_and(is_final) FROM factory_2.sums_1m_status") == [(True,)]
    async with PostgresStore(database_url) as store:
        new = Owner(store, await store.deploy(spec))
        await new.register()
        await new.claim()
        for name in ("sums", "alarms"):
            floors = {(await new.opened(i)).recovered.horizon_floor for i in new.deployment.intervals_of(name)}
            assert floors == ({Instant(6 * HOUR)} if name == "sums" else {-(2**62)})
        made = at_hour(new.deployment.table_ids["sums_1m"], 7, ("a", 0.5, 0))
        made.columns[3:5] = [[9.0], [7.5]]
        await new.commit(new.checkpoint(new.deployment.intervals_of("sums")[0], results=[made]))
    assert rows(database_url, FOUND.format("factory_2")) == sorted([*whole, ("a", 7, 7.5, 9.0)])


async def test_a_row_that_is_added_behind_the_last_end_while_a_copy_runs_is_copied(
    owner: Owner, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correction can add a row to a window that had none."""
    await store_at(owner, 1, 2, 3, 4)
    await reach(owner, 6)
    monkeypatch.setattr(copied_results, "ROWS", 1)
    spec = second()
    async with PostgresStore(database_url) as store:
        deployment = await store.deploy(spec, on_purpose=True, copy_results=True)
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(
                "CREATE TEMP TABLE added AS SELECT * FROM factory.sums_1m ORDER BY window_end DESC LIMIT 1"
            )
            connection.execute("DELETE FROM factory.sums_1m WHERE window_end = (SELECT max(window_end) FROM added)")
            await store.copy_results(spec, deployment.graph_id)
            connection.execute("INSERT INTO factory.sums_1m SELECT * FROM added")
        while await store.copy_results(spec, deployment.graph_id) is not None:
            pass
    assert [hour for _, hour, _, _ in rows(database_url, FOUND.format("factory_2"))] == [1, 2, 3, 4]


async def test_a_table_with_a_retention_gets_rows_as_far_back_as_it_keeps_them(owner: Owner, database_url: str) -> None:
    await store_at(owner, *range(1_000, 1_100))
    await reach(owner, None)
    spec = second(retention_us=48 * HOUR)
    piece = {"after": 1_050 * HOUR, "until": 1_060 * HOUR, "begin": 1_049 * HOUR}
    query = b"EXPLAIN SELECT FROM factory.sums_1m WHERE " + copied_results._PIECE.as_bytes()
    with psycopg.connect(database_url) as connection:
        connection.execute("SET enable_seqscan = off")
        plan = [line for (line,) in connection.execute(query, piece)]
    assert any("Index Cond: ((window_start >=" in line for line in plan), plan

    async with PostgresStore(database_url) as store:
        deployment = await store.deploy(spec, on_purpose=True, copy_results=True)
        while await store.copy_results(spec, deployment.graph_id) is not None:
            pass

    found = rows(database_url, "SELECT count(*), min(window_end), max(window_end) FROM factory_2.sums_1m")
    assert (found[0][0], found[0][2] - found[0][1]) == (48, hours(47))


async def test_a_late_record_of_a_window_waits_until_its_row_is_copied(owner: Owner, database_url: str) -> None:
    """Else it would make the row, of itself alone, and the copy would leave that as it is."""
    ends = [hour * HOUR for hour in (1, 2, 3, 4)]
    starts = [end - 60_000_000 for end in ends]
    late = LateRows("readings", "sums", [b'"a"'] * 4, [b"{}"] * 4, starts, ends, starts, ends)  # type: ignore[arg-type]
    await owner.commit(owner.checkpoint(owner.deployment.intervals_of("sums")[0], late=[late]))
    ids = [interval.interval_id for interval in owner.deployment.intervals]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SELECT millpy.replay_into_window(array_agg(late_record_id), 'x') FROM mill.late_records")
        for copied_to, read in ((1, [1, 4]), (2, [1, 2, 4]), (3, [1, 2, 3, 4])):
            change = "UPDATE mill.result_tables SET copied_to = %s, copied_until = %s WHERE name = 'sums_1m'"
            connection.execute(change, [copied_to * HOUR, 3 * HOUR])
            found = await owner.store.read_requests(ids, records_max=10, bytes_max=10**6)
            assert [request.window.end // HOUR for request in found.requests if request.window is not None] == read


async def test_a_generation_that_was_deployed_without_a_copy_gets_none(owner: Owner, database_url: str) -> None:
    await store_at(owner, 1)
    async with PostgresStore(database_url) as store:
        await store.deploy(second())
        with pytest.raises(UsageError, match="deployed without --copy-results"):
            await store.deploy(second(), on_purpose=True, copy_results=True)
        with pytest.raises(UsageError, match="deployed without --copy-results"):
            await store.plan_copies(second())
        with pytest.raises(GraphError, match="no other generation"):
            await store.plan_copies(replace(a_graph("other"), generation=2))


def test_a_table_that_does_not_fit_is_refused_with_its_columns() -> None:
    current = a_graph().description()

    def problem(spec: GraphSpec) -> str:
        with pytest.raises(GraphError) as raised:
            copies_between(current, spec.description())
        return raised.value.message

    needed = replace(HIGH, nullable=False)
    changed = replace(TOTAL, sql_type="bigint")
    found = problem(second(needed, changed, replace(LABEL, nullable=False)))
    assert found == (
        "rows cannot be copied to sums_1m: column 'high' is new and cannot be NULL, column 'total' changed from "
        "double precision to bigint, column 'label' could be NULL and cannot be any more"
    )
    room = (ColumnSpec("room", "text", False),)
    assert "its key changed from device text to room text" in problem(second(keys=room))
    assert "no windowed result table in common" in problem(second(name="others"))

"""Result tables with a retention: what stays, what goes, and that nobody waits for a partition."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

from millpy import (
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    File,
    FixedWindows,
    Graph,
    SessionWindows,
    Sum,
    hours,
    minutes,
)
from millpy.admin.queries import Admin
from millpy.admin.repairs import graph_id, repair_rows
from millpy.errors import GraphVersionError, PaneOrderError, PoisonError
from millpy.limits import Limits
from millpy.model.checkpoint import LateRows, ResultRows
from millpy.model.deployment import Deployment, GraphSpec
from millpy.model.finding import Severity
from millpy.model.time import INSTANT_MAX, Instant
from millpy.process.assembly import run_worker
from millpy.store.postgres import corrections
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph, alarm_rows, panes
from tests.conformance.test_doctor import found
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

HOUR = 3_600_000_000
RETENTION = 2 * HOUR
LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1)
SUMS = "SELECT device, total FROM factory.sums_1m ORDER BY 1"
PARTITIONS = "SELECT range_lo / 3600000000, range_hi / 3600000000 FROM mill.partitions ORDER BY 1"
DROP = "SELECT (mill.drop_partitions(table_id)).* FROM mill.result_tables WHERE retention_us IS NOT NULL ORDER BY name"
DROPPED = "SELECT sum((mill.drop_partitions(table_id)).dropped) FROM mill.result_tables"


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


def kept(retention_us: int = RETENTION, history: str = "accumulating") -> GraphSpec:
    graph = a_graph()
    sums, alarms = (replace(table, retention_us=retention_us) for table in graph.tables)
    return replace(graph, tables=(replace(sums, history=history), alarms))


@pytest.fixture
def spec() -> GraphSpec:
    return kept()


def at_hour(table: int, hour: float, *found: tuple[str, float | None, int], first: bool = True) -> ResultRows:
    """Panes of windows that end at an hour."""
    made = panes(table, *found, first=first)
    made.columns[1] = [int(hour * HOUR) - 60_000_000] * len(found)
    made.columns[2] = [int(hour * HOUR)] * len(found)
    return made


async def store_at(owner: Owner, *hours_of_rows: float, device: str = "a", **changes: Any) -> None:
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
    parts = [at_hour(table, hour, (device, hour, 0)) for hour in hours_of_rows]
    await owner.commit(owner.checkpoint(interval, results=parts, **changes))


def run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]


async def reach(owner: Owner, hour: float | None) -> None:
    """Move the input watermark of all intervals of the windows; None ends the input."""
    at = Instant(INSTANT_MAX if hour is None else int(hour * HOUR))
    intervals = owner.deployment.intervals_of("sums")
    await owner.commit(*(owner.checkpoint(i, input_watermark=at, low_watermark=at) for i in intervals))


async def test_rows_are_those_of_a_table_without_retention_from_the_oldest_partition_on(database_url: str) -> None:
    feed = Feed(batch_max=50)
    rng = random.Random(5)
    spread = [Reading(f"d{rng.randrange(3)}", at + rng.randrange(1_200), at % 7) for at in range(1200, 40_000, 300)]

    def graph() -> Graph:
        made = Graph("factory")
        at = EventTime("at", unit="s", max_disorder=minutes(20))
        source = made.inject("readings", feed, schema=Reading, event_time=at)
        for name, retention in (("all_rows", None), ("sums", hours(2))):
            windowed = source.key_by("device").window(
                SessionWindows(minutes(9)), allowed_lateness=hours(1), trigger=AfterWatermark(early=AfterCount(3))
            )
            total = windowed.aggregate(n=Count(), total=Sum("value"))
            total.to_table(name, history=True, retention=retention)
        unique = source.deduplicate(["device", "at"], minutes(60), name="unique")
        unique.to_table("raw", retention=hours(2))
        return made

    dropped = 0
    for start in range(0, len(spread), 33):
        feed.push(*map(msgspec.json.encode, spread[start : start + 33]))
        await fed(database_url, graph(), feed, LIMITS)
        dropped += rows(database_url, DROPPED)[0][0] or 0

        (oldest, watermark) = rows(
            database_url,
            "SELECT min(starts_at), (SELECT min(input_watermark) FROM millpy.watermarks WHERE computation = 'sums')"
            " FROM millpy.partitions WHERE result_table = 'sums'",
        )[0]
        for ending in ("", "_history"):
            columns = f"device, window_start, window_end, n, total, pane_index{', is_retraction' if ending else ''}"
            everything = rows(database_url, f"SELECT {columns} FROM factory.all_rows{ending} ORDER BY 1, 2, 3, 6")
            found = rows(database_url, f"SELECT {columns} FROM factory.sums{ending} ORDER BY 1, 2, 3, 6")
            assert found == [row for row in everything if row[2] >= oldest]
        assert watermark < oldest + hours(2) + hours(2)  # one partition more than the retention

    assert dropped > 10
    assert rows(database_url, "SELECT count(*) FROM factory.sums_status WHERE NOT is_final")[0][0] > 0
    told = "SELECT sum((detail ->> 'partitions')::int), count(DISTINCT detail ->> 'table') FROM millpy.events"
    assert rows(database_url, f"{told} WHERE kind = 'rows_expired'") == [(dropped, 2)]


async def test_partitions_are_made_for_any_time_and_their_number_is_bounded(owner: Owner, database_url: str) -> None:
    rng = random.Random(1)
    table, alarms = owner.deployment.table_ids["alarms"], owner.deployment.intervals_of("alarms")[0]
    far = [-(10**15), -1, 0, 8_000_000_000_000_000, 2 * 10**17, *(HOUR * 400_000 + n * HOUR for n in range(60))]
    wild = [rng.randrange(HOUR * 1_900_000) for _ in range(700)]
    for times in (far, wild, sorted(wild, reverse=True)):
        made = alarm_rows(table, *map(float, range(len(times))))
        made.columns[2] = list(times)
        await owner.commit(owner.checkpoint(alarms, results=[made]))

    (count, distinct) = rows(database_url, "SELECT count(*), count(DISTINCT event_time) FROM factory.alarms")[0]
    ranges = rows(database_url, "SELECT range_lo, range_hi FROM mill.partitions ORDER BY 1")

    assert count == len(far) + 2 * len(wild)
    assert distinct == len({*far, *wild})
    assert len(ranges) <= 2 * 256
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))


async def test_a_partition_that_is_gone_is_made_again(owner: Owner, database_url: str) -> None:
    await store_at(owner, 5.5, 7.5)
    assert rows(database_url, PARTITIONS) == [(5, 6), (7, 8)]
    names = [name for (name,) in rows(database_url, "SELECT relation FROM millpy.partitions")]
    run(database_url, f"DROP TABLE {names[0]}")
    run(database_url, f"ALTER TABLE factory.sums_1m DETACH PARTITION {names[1]}")
    run(database_url, f"ALTER TABLE factory.sums_1m_history DETACH PARTITION {names[1]}_history")
    run(database_url, f"DROP TABLE {names[0]}_history")

    await store_at(owner, 5.5, 7.5, device="b")

    assert rows(database_url, SUMS) == [("b", 5.5), ("b", 7.5)]


async def test_what_may_still_change_is_kept_and_no_reader_holds_up_a_commit(owner: Owner, database_url: str) -> None:
    await store_at(owner, 1, 2, 3, 4.5)
    await reach(owner, 3.9)
    assert rows(database_url, DROPPED) == [(0,)]
    await reach(owner, 4)
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT count(*) FROM factory.sums_1m")  # in a transaction that stays open
        async with asyncio.timeout(5):
            await store_at(owner, 9.5, 10.5, input_watermark=Instant(4 * HOUR), low_watermark=Instant(4 * HOUR))
        assert rows(database_url, DROP)[1] == (0, "a transaction reads or writes the table")

    assert await owner.store.forget_old(
        now_us=Instant(1), dead_letter_kept_s=9e6, settled_kept_s=9e6, events_kept_s=9e6
    )

    assert [total for _, total in rows(database_url, SUMS)] == [2, 3, 4.5, 9.5, 10.5]
    assert rows(database_url, "SELECT count(*) FROM factory.sums_1m_history") == [(5,)]
    detail = rows(database_url, "SELECT detail FROM millpy.events WHERE kind = 'rows_expired'")[0][0]
    assert (detail["table"], detail["rows"], detail["partitions"]) == ("sums_1m", 1, 1)
    assert detail["to"] == "1970-01-01T02:00:00+00:00"


async def test_the_slowest_interval_decides_what_is_old(owner: Owner, database_url: str) -> None:
    await store_at(owner, 1)
    for interval, hour, dropped in ((1, 20, 0), (0, 3.9, 0), (0, 4, 1)):
        at = Instant(int(hour * HOUR))
        of = owner.deployment.intervals_of("sums")[interval]
        await owner.commit(owner.checkpoint(of, input_watermark=at, low_watermark=at))
        assert rows(database_url, DROPPED) == [(dropped,)]


async def test_at_the_end_of_the_input_age_counts_from_the_newest_rows(owner: Owner, database_url: str) -> None:
    await store_at(owner, 1, 5, 8.2, 2_000_000)  # the last one is in the future
    await reach(owner, None)

    assert rows(database_url, DROPPED) == [(2,)]
    assert [total for _, total in rows(database_url, SUMS)] == [8.2, 2_000_000]


async def test_a_file_keeps_its_newest_rows_though_its_worker_ends_at_once(database_url: str, tmp_path: Path) -> None:
    lines = [Reading("d", hour * 3_600, 1) for hour in range(60)]
    (tmp_path / "feed.ndjson").write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    graph = Graph("factory")
    at = EventTime("at", unit="s", sorted=True)
    source = graph.inject("readings", File(str(tmp_path / "feed.ndjson")), schema=Reading, event_time=at)
    windowed = source.key_by("device").window(FixedWindows(minutes(30)))
    windowed.aggregate(n=Count()).to_table("sums", history=True, retention=hours(5))

    async with asyncio.timeout(30):
        await run_worker(graph, database_url, limits=LIMITS, stop=asyncio.Event())

    hours_of = "SELECT (extract(epoch FROM window_start) / 3600)::int FROM factory.{} ORDER BY 1"
    for name in ("sums", "sums_history"):
        assert [hour for (hour,) in rows(database_url, hours_of.format(name))] == list(range(54, 60))
    assert rows(database_url, "SELECT count(*) FROM mill.partitions") == [(6,)]


async def test_a_longer_lateness_than_the_retention_keeps_rows(owner: Owner, database_url: str) -> None:
    run(database_url, f"UPDATE mill.result_tables SET allowed_lateness_us = {5 * HOUR}")
    await store_at(owner, 1)
    await reach(owner, 6.9)

    assert rows(database_url, DROPPED) == [(0,)]


@pytest.mark.parametrize("many", [False, True], ids=["insert", "copy"])
async def test_errors_in_a_partition_are_those_of_the_table(owner: Owner, database_url: str, many: bool) -> None:
    table, interval = owner.deployment.table_ids["sums_1m"], owner.deployment.intervals_of("sums")[0]
    more = [(f"d{n}", 1.0, 0) for n in range(300 if many else 0)]

    async def attempt(*found: tuple[str, float | None, int]) -> None:
        checkpoint = owner.checkpoint(interval, results=[at_hour(table, 5, *found, *more)])
        await owner.store.commit([checkpoint], graph_version=owner.deployment.version)

    run(database_url, "ALTER TABLE factory.sums_1m ADD CONSTRAINT not_negative CHECK (total >= 0)")
    with pytest.raises(PoisonError, match='new row for relation "sums_1m" violates check constraint') as refused:
        await attempt(("a", -1.0, 0))
    assert refused.value.table == "sums_1m"
    await owner.commit(owner.checkpoint(interval, results=[at_hour(table, 5, ("a", 1.0, 0))]))
    with pytest.raises(PaneOrderError, match="first pane"):
        await attempt(("a", 1.0, 0))
    run(
        database_url,
        "CREATE FUNCTION public.mine() RETURNS trigger LANGUAGE plpgsql AS"
        " $$ BEGIN NEW.window_end := NULL; RETURN NEW; END $$",
        "CREATE TRIGGER mine BEFORE INSERT ON factory.sums_1m FOR EACH ROW EXECUTE FUNCTION public.mine()",
    )
    with pytest.raises(PoisonError):
        await attempt(("b", 1.0, 0))


async def test_a_repair_reaches_a_partition_that_does_not_exist(owner: Owner, database_url: str) -> None:
    await store_at(owner, 5.5)
    admin = Admin(database_url)
    start, end = str(int(5.5 * HOUR) - 60_000_000), str(int(5.5 * HOUR))
    given: list[tuple[str, list[Any]]] = [
        ("changed", ["a", start, end, "1.0", "x"]),
        ("missing", ["b", str(99 * HOUR), str(100 * HOUR), "2.0", None]),
    ]
    table = kept().tables[0]

    for again in (False, True):
        done = repair_rows(admin, ("factory", graph_id(admin, "factory")), table, given)
        assert done == {"replaced": 1 + again, "added": 1 - again, "deleted": 0}

    assert rows(database_url, SUMS) == [("a", 1.0), ("b", 2.0)]


async def test_a_window_whose_rows_were_dropped_says_so_to_its_late_records(owner: Owner, database_url: str) -> None:
    await store_at(owner, 1.5, 2.5, 19.5)
    ends = [int(hour * HOUR) for hour in (1.5, 1.75, 2, 2.25, 18.5)]
    starts, count = [end - 60_000_000 for end in ends], len(ends)
    late = LateRows("readings", "sums", [b'"a"'] * count, [b"{}"] * count, starts, [20 * HOUR] * count, starts, ends)
    await owner.commit(owner.checkpoint(owner.deployment.intervals_of("sums")[0], late=[late]))
    await reach(owner, 4.5)
    run(database_url, DROP, "SELECT millpy.replay_into_window(array_agg(late_record_id), 'x') FROM mill.late_records")

    async def dropped() -> list[bool]:
        ids = [interval.interval_id for interval in owner.deployment.intervals]
        found = await owner.store.read_requests(ids, records_max=10, bytes_max=10**6)
        windows = [request.window for request in found.requests if request.window is not None]
        assert all(window.row is None for window in windows)
        return [window.end < window.dropped_to for window in windows]

    assert await dropped() == [True, True, False, False, False], "the partition that begins at 2 is there"
    await reach(owner, None)
    run(database_url, DROP)
    assert await dropped() == [True, True, True, True, False]


async def test_a_partition_that_is_dropped_while_requests_are_read_takes_no_row_unnoticed(
    owner: Owner, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_at(owner, 1.5, 19.5)
    end = int(1.5 * HOUR)
    late = LateRows("readings", "sums", [b'"a"'], [b"{}"], [end - 1], [20 * HOUR], [end - 60_000_000], [end])
    await owner.commit(owner.checkpoint(owner.deployment.intervals_of("sums")[0], late=[late]))
    await reach(owner, 4.5)
    run(database_url, "SELECT millpy.replay_into_window(array_agg(late_record_id), 'x') FROM mill.late_records")
    read = corrections._rows_of

    async def after_a_drop(*given: Any) -> Any:
        run(database_url, DROP)
        return await read(*given)

    monkeypatch.setattr(corrections, "_rows_of", after_a_drop)
    ids = [interval.interval_id for interval in owner.deployment.intervals]
    (request,) = (await owner.store.read_requests(ids, records_max=10, bytes_max=10**6)).requests

    assert request.window is not None
    assert (request.window.row, request.window.dropped_to) == (None, 2 * HOUR)


async def test_generations_keep_their_partitions_through_a_switch(owner: Owner, database_url: str) -> None:
    await store_at(owner, 5.5)
    async with PostgresStore(database_url) as store:
        second = Owner(store, await store.deploy(replace(kept(), generation=2)))
        await second.register()
        await second.claim()
        await store_at(second, 5.5, device="second")
        await store.switch("factory", 2)
        again = Owner(store, await store.deploy(replace(kept(), generation=2)))
        await again.register()
        await again.claim()
        await store_at(again, 6.5, device="second")

        assert rows(database_url, SUMS) == [("second", 5.5), ("second", 6.5)]
        assert rows(database_url, SUMS.replace("factory", "factory_1")) == [("a", 5.5)]
        await store.unregister(owner.worker_id)
        await store.drop("factory_1")
    assert rows(database_url, "SELECT DISTINCT graph, starts_at FROM millpy.partitions ORDER BY 2") == [
        ("factory", datetime.fromtimestamp(hour * 3600, UTC)) for hour in (5, 6)
    ]
    assert rows(
        database_url,
        "SELECT count(*) FROM pg_class WHERE relname LIKE 'result~_%' ESCAPE '~'"
        " AND relkind = 'r' AND relname <> 'result_tables'",
    ) == [(4,)]


async def test_another_retention_is_deployed_on_purpose_and_holds_for_old_partitions(database_url: str) -> None:
    async with PostgresStore(database_url) as store:
        owner = Owner(store, await store.deploy(kept(100 * HOUR)))
        await owner.register()
        await owner.claim()
        await store_at(owner, 1, 7, 99)
        assert rows(database_url, PARTITIONS) == [(0, 6), (6, 12), (96, 102)]
        with pytest.raises(GraphVersionError, match=r"retention changed from hours\(100\) to hours\(\d+\)"):
            await store.deploy(kept())
        deployment: Deployment = await store.deploy(kept(), on_purpose=True)
        owner = Owner(store, deployment)
        await owner.register()
        await owner.claim()
        await store_at(owner, 95, 97, 103.5)
        await reach(owner, 13)

    assert rows(database_url, DROPPED) == [(1,)]
    assert rows(database_url, PARTITIONS) == [(6, 12), (95, 96), (96, 102), (103, 104)]


async def test_default_privileges_open_no_partition(owner: Owner, database_url: str) -> None:
    run(database_url, "CREATE ROLE someone", "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO someone, PUBLIC")
    try:
        await store_at(owner, 1)
        relations = (
            "SELECT relation FROM millpy.partitions UNION ALL SELECT relation || '_history' FROM millpy.partitions"
        )
        open_to = f"SELECT has_table_privilege('someone', relation, 'SELECT') FROM ({relations}) AS r"
        assert rows(database_url, open_to) == [(False,), (False,)]
    finally:
        run(database_url, "DROP OWNED BY someone", "DROP ROLE someone")


async def test_a_partition_that_was_detached_to_keep_it_is_not_dropped(owner: Owner, database_url: str) -> None:
    await store_at(owner, 1.5, 2.5, 19.5)
    names = [name for (name,) in rows(database_url, "SELECT relation FROM millpy.partitions ORDER BY starts_at")]
    run(
        database_url,
        f"ALTER TABLE factory.sums_1m DETACH PARTITION {names[0]}",
        f"ALTER TABLE factory.sums_1m_history DETACH PARTITION {names[0]}_history",
        f"ALTER TABLE factory.sums_1m_history DETACH PARTITION {names[1]}_history",
    )
    await reach(owner, 19)

    assert rows(database_url, DROPPED) == [(2,)]

    assert rows(database_url, f"SELECT total FROM {names[0]}") == [(1.5,)]
    assert rows(database_url, f"SELECT total FROM {names[0]}_history") == [(1.5,)]
    assert rows(database_url, f"SELECT to_regclass('{names[1]}') IS NULL") == [(True,)]
    assert rows(database_url, f"SELECT total FROM {names[1]}_history") == [(2.5,)]
    assert rows(database_url, SUMS) == [("a", 19.5)]


async def test_a_partition_whose_detaching_was_interrupted_is_not_dropped(owner: Owner, database_url: str) -> None:
    """DETACH … CONCURRENTLY that was cancelled has decided already that the rows are the user's."""
    await store_at(owner, 1.5, 19.5)
    ((name,),) = rows(database_url, "SELECT relation FROM millpy.partitions ORDER BY starts_at LIMIT 1")
    pending = f"UPDATE pg_inherits SET inhdetachpending = true WHERE inhrelid = '{name}'::regclass"
    run(database_url, f"SET allow_system_table_mods = on; {pending}")
    await reach(owner, 19)

    assert rows(database_url, DROPPED) == [(1,)]

    assert rows(database_url, f"SELECT total FROM {name}") == [(1.5,)]
    assert rows(database_url, f"SELECT to_regclass('{name}_history') IS NULL") == [(True,)]


async def test_a_foreign_key_keeps_the_partitions_to_which_it_refers_and_no_others(
    owner: Owner, database_url: str
) -> None:
    expired = [1.5 + hour for hour in range(20)]
    await store_at(owner, *expired, 30.5)
    run(
        database_url,
        "CREATE TABLE public.notes (device text, window_start timestamptz, window_end timestamptz, note text,"
        " CONSTRAINT notes_of_sums FOREIGN KEY (device, window_start, window_end) REFERENCES factory.sums_1m)",
        "INSERT INTO public.notes SELECT device, window_start, window_end, 'look' FROM factory.sums_1m"
        " WHERE total < 17 OR total = 30.5",
    )
    await reach(owner, 30)
    because = "rows of public.notes refer to them by the foreign key notes_of_sums"
    named = "factory.sums_1m: foreign key notes_of_sums of public.notes refers to its rows"
    assert named in found(database_url)["retention"][1].replace(" of notes ", " of public.notes ")

    assert rows(database_url, DROP)[1] == (4, because)
    dropped_to = "SELECT dropped_to FROM mill.result_tables WHERE name = 'sums_1m'"
    assert rows(database_url, dropped_to) == [(21 * HOUR,)]
    assert [total for _, total in rows(database_url, SUMS)] == [*expired[:16], 30.5]

    run(database_url, "DELETE FROM public.notes WHERE window_end < '1970-01-01 03:00+00'")
    assert rows(database_url, DROP)[1] == (2, because)
    assert rows(database_url, dropped_to) == [(21 * HOUR,)], "later windows have lost their rows, too"
    assert [total for _, total in rows(database_url, SUMS)] == [*expired[2:16], 30.5]
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        run(database_url, "DELETE FROM factory.sums_1m")
    ((role,),) = rows(database_url, "SELECT 'keeper_' || current_database()")
    run(database_url, f"CREATE ROLE {role}", f"ALTER TABLE factory.sums_1m OWNER TO {role}")
    try:
        severity, text = found(database_url)["retention"]
        assert severity is Severity.WARNING
        assert f"its owner {role} may not read" in text
    finally:
        run(database_url, "ALTER TABLE factory.sums_1m OWNER TO CURRENT_USER", f"DROP ROLE {role}")

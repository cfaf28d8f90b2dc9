"""A changed graph under a running one: what goes in live, what two versions on disk may do, a deploy that is killed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import psycopg
import pytest

from millpy.graph import Graph
from millpy.hosting.failpoints import Failpoint
from millpy.ingest.settings import EventTime
from millpy.limits import Limits
from millpy.model.time import minutes, seconds
from millpy.process.assembly import run_worker
from millpy.windowing.aggregates.numeric import Count, Max, Sum
from millpy.windowing.window import FixedWindows, SessionWindows
from tests.commands import millpy as run
from tests.crash.graph_files import (
    DEVICES,
    END,
    EVERY_MINUTE,
    GRAPH,
    MIDDLE,
    SOURCE,
    Reading,
    consumed,
    done,
    drop,
    feed_of,
    one,
    rows,
    sums,
)
from tests.crash.harness import Worker, await_true, committed
from tests.feed import Feed
from tests.forked import fork_millpy

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.2)


def before(feed: Feed) -> Graph:
    graph = Graph("factory")
    source = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", unit="s", sorted=True))
    keyed = source.key_by("device")
    keyed.window(FixedWindows(minutes(1))).aggregate(n=Count(), total=Sum("value")).to_table("minutes")
    keyed.window(SessionWindows(seconds(30))).aggregate(n=Count()).to_table("sessions")
    return graph


def after(feed: Feed) -> Graph:
    graph = Graph("factory")
    source = graph.inject("readings", feed, schema=Reading, event_time=EventTime("at", unit="s", sorted=True))
    keyed = source.key_by("device")
    two = keyed.window(FixedWindows(minutes(2))).aggregate(n=Count(), total=Sum("value"))
    keyed.window(FixedWindows(minutes(1))).aggregate(n=Count(), total=Sum("value"), high=Max("value")).to_table(
        "minutes"
    )
    keyed.window(SessionWindows(seconds(30))).aggregate(n=Count(), high=Max("value")).to_table("sessions")
    two.to_table("two_minutes")
    return graph


PENDING = "SELECT coalesce(sum(pending), 0) FROM millpy.accounting"


async def fed(url: str, graph: Graph, feed: Feed, limits: Limits = LIMITS, only: Sequence[str] = ()) -> None:
    """One worker, until everything that was pushed is committed, and consumed unless it is one of some computations."""
    stop = asyncio.Event()
    worker = asyncio.create_task(run_worker(graph, url, limits=limits, only=only, stop=stop, patient=True))
    async with asyncio.timeout(60):
        while feed.unacknowledged and not worker.done():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while not (only or worker.done()) and await asyncio.to_thread(one, url, PENDING):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    stop.set()
    await worker


async def test_additions_under_open_windows_keep_old_results_exact(database_url: str) -> None:
    feed = Feed()
    feed.push(*feed_of((0, MIDDLE)))
    await fed(database_url, before(feed), feed)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader_of_minutes")
        connection.execute("GRANT SELECT (device, n) ON factory.minutes TO reader_of_minutes")
        connection.execute("GRANT SELECT ON factory.minutes_status TO reader_of_minutes")
        connection.execute("CREATE VIEW public.mine AS SELECT device, n, is_final FROM factory.minutes_status")
    feed.push(*feed_of((MIDDLE, END)))
    feed.end()

    await run_worker(after(feed), database_url, limits=LIMITS)

    query = (
        "SELECT device, n, total::bigint, high FROM factory.minutes WHERE window_start = to_timestamp({}) ORDER BY 1"
    )
    for start in range(0, END, 60):
        found = rows(database_url, query.format(start))
        assert [row[:3] for row in found] == sums(start, start + 60), start
        complete = start > MIDDLE
        highs = [(start + 59) * 10 + device if complete else None for device in range(DEVICES)]
        assert [row[3] for row in found] == highs, start
    assert rows(database_url, "SELECT DISTINCT n, high FROM factory.sessions") == [(END, None)]
    found = rows(database_url, "SELECT device, n, total::bigint FROM factory.two_minutes ORDER BY window_start, device")
    assert found == [*sums(0, 120, from_s=MIDDLE), *sums(120, 240)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    assert one(
        database_url,
        "SELECT bool_and(is_final AND (high IS NULL) = (window_start < to_timestamp(120))) FROM factory.minutes_status",
    )
    assert one(database_url, "SELECT has_column_privilege('reader_of_minutes', 'factory.minutes', 'n', 'SELECT')")
    assert not one(
        database_url, "SELECT has_column_privilege('reader_of_minutes', 'factory.minutes', 'high', 'SELECT')"
    )
    assert one(database_url, "SELECT count(*) FROM public.mine WHERE is_final") == DEVICES * 4
    (event,) = rows(database_url, "SELECT detail FROM millpy.events WHERE kind = 'deployed'")
    assert event[0]["version"] == 2
    assert any("two_minutes: the computation is new" in change for change in event[0]["changes"])


ADDED = 'keyed.window(FixedWindows(minutes(2))).aggregate(n=Count()).to_table("two_minutes")\n'
COLUMN = GRAPH.replace('total=Sum("value"))', 'total=Sum("value"), high=Max("value"))')


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with two versions of one graph on disk, and a feed."""
    (tmp_path / "feed").mkdir()
    (tmp_path / "old.py").write_text(GRAPH)
    (tmp_path / "new.py").write_text(GRAPH + ADDED)
    return tmp_path


def test_rolling_restart_with_two_versions_on_disk_is_exact(place: Path, database_url: str) -> None:
    drop(place, 0, MIDDLE)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, MIDDLE * DEVICES), "the first part")
        with Worker(place, database_url, place, graph=place / "new.py") as new:
            drop(place, MIDDLE, 150)
            new.await_while_running(consumed(database_url, 150 * DEVICES), "the second part")
            await_true(lambda: old.process.poll() is not None, "the worker of the old version has stopped")
            with Worker(place, database_url, place, graph=place / "old.py") as again:
                await_true(lambda: again.process.poll() is not None, "it does not come back with its old file")
            drop(place, 150, END)
            drop(place, 1_000, 1_001)
            new.await_while_running(consumed(database_url, (END + 1) * DEVICES), "the rest")

    assert (old.process.returncode, again.process.returncode) == (1, 1)
    for stopped in (old, again):
        assert "version 2 of graph 'factory' has more than this file" in stopped.log
    assert one(database_url, "SELECT version FROM mill.graphs") == 2
    assert rows(database_url, EVERY_MINUTE) == [row for start in range(0, END, 60) for row in sums(start, start + 60)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


DIES = (
    COLUMN
    + """
import os

class Dies(Computation):
    n = Value(int, default=0)

    def process_record(self, context, record):
        os._exit(7)

graph.process(Dies(), name="dies", inputs=[source.key_by("device")], output=Reading).to_table("dead")
"""
)


def test_deployment_whose_workers_die_at_once_can_be_reverted(place: Path, database_url: str) -> None:
    (place / "new.py").write_text(DIES)
    drop(place, 0, MIDDLE)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, MIDDLE * DEVICES), "the first part")
    drop(place, MIDDLE, END)
    with Worker(place, database_url, place, graph=place / "new.py") as new:
        await_true(lambda: new.process.poll() is not None, "it has died")
    assert new.process.returncode == 7, new.log
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader_of_status")
        connection.execute("GRANT SELECT (device, high) ON factory.minutes_status TO reader_of_status")
    status, _, err = done(fork_millpy(place, "deploy", "old.py", "--database", database_url))
    assert (status, "the file lacks parts of the deployed graph" in err) == (2, True), err

    status, out, err = done(fork_millpy(place, "deploy", "old.py", "--back", "--database", database_url))

    assert (status, "- dies: the computation was removed" in out, "version 3 is deployed" in out) == (0, True, True), (
        err
    )
    status, _, err = done(fork_millpy(place, "run", "new.py", "--database", database_url))
    assert (status, "additions to graph 'factory' have been taken back" in err) == (1, True), err
    drop(place, 1_000, 1_001)
    with Worker(place, database_url, place, graph=place / "old.py") as again:
        again.await_while_running(consumed(database_url, (END + 1) * DEVICES), "the rest")
    assert rows(database_url, EVERY_MINUTE) == [row for start in range(0, END, 60) for row in sums(start, start + 60)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    query = "SELECT has_column_privilege('reader_of_status', 'factory.minutes_status', 'device', 'SELECT')"
    assert one(database_url, query)
    left = "SELECT count(*) FROM mill.keyed WHERE interval_id NOT IN (SELECT interval_id FROM mill.intervals)"
    assert one(database_url, left) == 0


def test_killed_deploy_leaves_the_old_version_intact(place: Path, database_url: str) -> None:
    (place / "new.py").write_text(COLUMN + ADDED)
    assert done(fork_millpy(place, "deploy", "old.py", "--database", database_url))[0] == 0
    with psycopg.connect(database_url) as reader:
        reader.execute("SELECT * FROM factory.minutes")  # its table cannot be altered until this has ended
        killed = fork_millpy(place, "deploy", "new.py", "--database", database_url)
        waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'ALTER TABLE%'"
        await_true(lambda: one(database_url, waits + " AND wait_event_type = 'Lock'") == 1, "it is in the middle")
        killed.kill()
        done(killed)
    await_true(lambda: one(database_url, waits) == 0, "the server has noticed")

    assert rows(database_url, "SELECT version, (SELECT count(*) FROM mill.computations) FROM mill.graphs") == [(1, 2)]
    assert one(database_url, "SELECT count(*) FROM mill.intervals WHERE graph_version <> 1") == 0
    status, out, err = done(fork_millpy(place, "deploy", "old.py", "--database", database_url))
    assert (status, err) == (0, "")
    assert "graph factory is deployed already: version 1" in out

    status, out, err = done(fork_millpy(place, "deploy", "new.py", "--database", database_url, "--json"))
    assert status == 0, err
    assert (json.loads(out)["deployed"], len(json.loads(out)["changes"])) == (2, 4)
    rows(database_url, "SELECT high FROM factory.minutes")


@pytest.mark.parametrize("point", [Failpoint.BEFORE_COMMIT, Failpoint.AFTER_FENCE])
def test_worker_that_was_frozen_during_a_deployment_writes_nothing(
    place: Path, database_url: str, point: Failpoint
) -> None:
    drop(place, 0, END)
    drop(place, 1_000, 1_001)
    with Worker(place, database_url, place, graph=place / "old.py", failpoint=f"{point}:3:stop") as old:
        old.await_frozen()
        status, out, err = done(fork_millpy(place, "deploy", "new.py", "--database", database_url))
        assert status == 0, err
        assert "version 2 is deployed" in out
        owners = "SELECT count(*) FROM mill.intervals WHERE worker_id IS NOT NULL OR graph_version <> 2"
        assert one(database_url, owners) == 0, "nobody waits for the lease of a worker that may not write"
        with Worker(place, database_url, place, graph=place / "new.py") as new:
            new.await_while_running(consumed(database_url, (END + 1) * DEVICES), "all of it")
            before = committed(database_url)
            old.thaw()
            await_true(lambda: old.process.poll() is not None, "the old one has stopped")
            assert new.process.poll() is None

    assert "GraphReplacedError" in old.log
    assert "version 2 of graph 'factory' has more than this file" in old.log
    assert all(committed(database_url)[interval] >= bundle for interval, bundle in before.items())
    assert rows(database_url, EVERY_MINUTE) == [row for start in range(0, END, 60) for row in sums(start, start + 60)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


def test_deploy_as_the_owner_terminates_the_commit_of_a_frozen_worker(place: Path, database_url: str) -> None:
    run("migrate", "--roles", "--database", database_url)
    assert done(fork_millpy(place, "deploy", "old.py", "--database", database_url))[0] == 0
    drop(place, 0, END)
    as_worker = database_url.replace("//millpy@", "//millpy_worker@")
    with Worker(place, as_worker, place, graph=place / "old.py", failpoint=f"{Failpoint.AFTER_FENCE}:2:stop") as old:
        old.await_frozen()
        as_owner = database_url.replace("//millpy@", "//millpy_owner@")
        status, out, err = done(fork_millpy(place, "deploy", "new.py", "--database", as_owner))

    assert (status, "version 2 is deployed" in out) == (0, True), err


def test_idle_worker_of_the_old_version_stops_too(place: Path, database_url: str) -> None:
    drop(place, 0, 10)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, 10 * DEVICES), "the feed")
        assert done(fork_millpy(place, "deploy", "new.py", "--database", database_url))[0] == 0

        await_true(lambda: old.process.poll() is not None, "the old one has stopped")

    assert "GraphReplacedError" in old.log
    assert one(database_url, "SELECT count(*) FROM mill.workers") == 0


TOLD = (
    SOURCE
    + """
class Told(msgspec.Struct):
    device: str
    n: int
    total: int
"""
)
SUMS = (
    TOLD
    + """
class Minutes(Computation):
    n = Value(int, default=0)
    totals = Value(int, default=0)
    seen = MapCell(int, int)

    def process_record(self, context, record):
        context[Minutes.n] += 1
        context[Minutes.totals] += record.value
        context[Minutes.seen][record.at // 60] = context[Minutes.n]
        context.produce(Told(record.device, context[Minutes.n], context[Minutes.totals]))

graph.process(Minutes(), name="minutes", inputs=[source.key_by("device")], output=Told).to_table("told")
"""
)
STRUCT = (
    TOLD
    + """
class Sums(msgspec.Struct):
    n: int
    total: int

class Minutes(Computation):
    sums = Value(Sums, default=Sums(0, 0))
    seen = MapCell(int, list[int])

    def process_record(self, context, record):
        sums = context[Minutes.sums]
        sums.n += 1
        sums.total += record.value
        context[Minutes.seen].setdefault(record.at // 60, []).append(sums.n)
        context.produce(Told(record.device, sums.n, sums.total))

def together(cells: dict[str, Any]) -> dict[str, Any]:
    with Path("called").open("a") as called:
        called.write("called\\n")
    while Path("hold").exists():
        pass
    return {
        "sums": {"n": cells.get("n", 0), "total": cells.get("totals", 0)},
        "seen": {minute: [n] for minute, n in cells["seen"].items()},
    }

graph.process(Minutes(), name="minutes", inputs=[source.key_by("device")], output=Told).to_table("told")
graph.upgrade("minutes", together)
"""
)


MORE = (
    SUMS.replace("    value: int\n", "    value: int\n    unit: str = 'mm'\n    tags: list[str] = []\n")
    .replace("    total: int\n", "    total: int\n    unit: str = ''\n    tags: list[str] = []\n")
    .replace("context[Minutes.totals])", "context[Minutes.totals], record.unit, record.tags)")
) + 'source.key_by("unit").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("units")\n'


def test_field_with_a_default_can_be_added_while_old_records_are_in_flight(place: Path, database_url: str) -> None:
    (place / "old.py").write_text(SUMS)
    (place / "new.py").write_text(MORE)
    drop(place, 0, 60)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, 60 * DEVICES), "the first part")
    with Worker(place, database_url, place, graph=place / "old.py", only="readings") as injecting:
        drop(place, 60, 120)
        waiting = "SELECT pending FROM millpy.accounting WHERE consumer = 'minutes'"
        injecting.await_while_running(lambda: one(database_url, waiting) == 60 * DEVICES, "records on their way")
    status, out, err = done(fork_millpy(place, "deploy", "new.py", "--database", database_url))
    assert (status, "+ stream readings: field 'unit' is new, str" in out) == (0, True), (out, err)
    lines = [{"device": "d0", "at": at, "value": 1, "unit": "km", "tags": ["far"]} for at in (130, 300)]
    (place / "feed" / "999999.ndjson").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Worker(place, database_url, place, graph=place / "new.py") as new:
        new.await_while_running(consumed(database_url, 120 * DEVICES + 2), "the rest")
        again = fork_millpy(place, "run", "old.py", "--database", database_url)
        status, _, err = done(again)

    assert (status, "has more than this file" in err) == (1, True), err
    reported = rows(database_url, "SELECT n, device, unit, tags FROM factory.told ORDER BY n, device")
    assert reported[: 60 * DEVICES] == [
        (n, f"d{device}", None, None) for n in range(1, 61) for device in range(DEVICES)
    ]
    assert reported[60 * DEVICES : -2] == [
        (n, f"d{device}", "mm", []) for n in range(61, 121) for device in range(DEVICES)
    ]
    assert reported[-2:] == [(121, "d0", "km", ["far"]), (122, "d0", "km", ["far"])]
    assert rows(database_url, "SELECT unit, n FROM factory.units ORDER BY window_start") == [("km", 1)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


def test_state_is_migrated_completely_or_not_at_all(place: Path, database_url: str) -> None:
    (place / "old.py").write_text(SUMS)
    (place / "new.py").write_text(STRUCT)
    drop(place, 0, MIDDLE)
    deploy = ("deploy", "new.py", "--database", database_url)
    with Worker(place, database_url, place, graph=place / "old.py") as old:
        old.await_while_running(consumed(database_url, MIDDLE * DEVICES), "the first part")
        status, out, err = done(fork_millpy(place, *deploy))
        assert (status, "^ minutes: cell 'n' was removed" in out) == (2, True), out
        assert "graph.upgrade" in err

        (place / "hold").touch()
        killed = fork_millpy(place, *deploy, "--upgrade")
        await_true((place / "called").exists, "it is in the middle")
        killed.kill()
        done(killed)
        (place / "hold").unlink()
        drop(place, MIDDLE, 120)
        old.await_while_running(consumed(database_url, 120 * DEVICES), "the old version runs on")

        (place / "wrong.py").write_text(STRUCT.replace('cells.get("n", 0)', '"many"'))
        for words in (["--dry-run"], []):
            command = ("deploy", "wrong.py", "--database", database_url, "--upgrade", *words)
            status, _, err = done(fork_millpy(place, *command))
            assert (status, "the upgrade of 'minutes' fails for key" in err) == (2, True), err
        status, out, err = done(fork_millpy(place, *deploy, "--upgrade", "--dry-run"))
        assert (status, "nothing was changed (--dry-run)" in out) == (0, True), err

        status, out, err = done(fork_millpy(place, *deploy, "--upgrade"))
        assert (status, "version 2 is deployed" in out) == (0, True), err
        await_true(lambda: old.process.poll() is not None, "the old one has stopped")
    drop(place, 120, END)
    with Worker(place, database_url, place, graph=place / "new.py") as new:
        new.await_while_running(consumed(database_url, END * DEVICES), "the rest")

    reported = rows(database_url, "SELECT device, n, total FROM factory.told ORDER BY device, n")
    totals = [[at * 10 + device for at in range(END)] for device in range(DEVICES)]
    assert reported == [
        (f"d{device}", n, sum(totals[device][:n])) for device in range(DEVICES) for n in range(1, END + 1)
    ]
    query = "SELECT value FROM millpy.state WHERE cell = 'seen' AND key = '\"d0\"' ORDER BY subkey::int"
    assert [value[0] for value in rows(database_url, query)] == [[60], [120], [*range(121, 181)], [*range(181, 241)]]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []

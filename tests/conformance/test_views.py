"""The views are exact and live, and the explanation of a watermark names its cause."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from millpy.admin.diagnosis import read_facts
from millpy.clock import SystemClock
from millpy.model.checkpoint import Cursor, DeadLetter, Entries, Kind, LateRows, Pause
from millpy.model.deployment import DeployedInterval
from millpy.model.time import INSTANT_MAX, Instant
from millpy.store.protocol import SourceReport
from tests.conformance.store_builders import MINUTE, Owner, a_segment, a_slice, counters, entries


def fetch(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        return connection.execute(query).fetchall()  # type: ignore[call-overload, no-any-return]


def test_no_column_of_a_view_needs_quotes(database_url: str) -> None:
    # millpy.workers had a column `only`, which is a reserved word.
    statement = """
        SELECT table_name, column_name FROM information_schema.columns
         WHERE table_schema = 'millpy' AND quote_ident(column_name) <> column_name
    """

    assert fetch(database_url, statement) == []


async def advance(owner: Owner, interval: DeployedInterval, watermark: int, **changes: Any) -> None:
    """Commit a bundle that publishes a watermark, and let every consumer take it unless it is named."""
    low = min(watermark, changes.get("oldest_work", INSTANT_MAX))
    await owner.commit(
        owner.checkpoint(interval, input_watermark=Instant(watermark), low_watermark=Instant(low), **changes)
    )


def cursors(owner: Owner, watermark: int, *producers: DeployedInterval) -> list[Cursor]:
    return [Cursor(p.interval_id, owner.bundles[p.interval_id], Instant(watermark)) for p in producers]


STATE = "SELECT graph, computation, cell, key, subkey, value FROM millpy.state ORDER BY key, subkey"


@pytest.mark.parametrize("folds_after", [0, 1, 2, 3])
async def test_state_view_does_not_depend_on_folding(owner: Owner, database_url: str, folds_after: int) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    changes: list[Entries] = [
        entries(Kind.STATE, "usual", ("a", 1), ("b", {"x": 1}), ("c", 3)),
        entries(Kind.STATE, "usual", ("a", 2), ("b", None)),
        entries(Kind.STATE, "usual", ("c", [None]), ("b", "back", "sub")),
    ]

    for number, change in enumerate(changes, start=1):
        await owner.commit(owner.checkpoint(interval, delta=(change,)))
        if number == folds_after:
            await owner.fold(interval)

    assert fetch(database_url, STATE) == [
        ("factory", "sums", "usual", '"a"', "", 2),
        ("factory", "sums", "usual", '"b"', "sub", "back"),
        ("factory", "sums", "usual", '"c"', "", [None]),
    ]


async def test_timers_and_windows_are_shown_in_time(owner: Owner, database_url: str) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    timer = entries(Kind.TIMER, "event", ("a", {"at": 1}, "quiet", 3 * MINUTE))
    window = entries(Kind.WINDOW, "", ("a", [1, 2.5], f"0/{MINUTE}", 2 * MINUTE))

    await owner.commit(owner.checkpoint(interval, delta=(timer, window)))

    timers = fetch(database_url, "SELECT key, timer, time_domain, fires_at::text FROM millpy.timers")
    assert timers == [('"a"', "quiet", "event", "1970-01-01 00:03:00+00")]
    windows = fetch(
        database_url, "SELECT key, window_start::text, window_end::text, expires_at::text FROM millpy.windows"
    )
    assert windows == [('"a"', "1970-01-01 00:00:00+00", "1970-01-01 00:01:00+00", "1970-01-01 00:02:00+00")]


async def test_backlog_counts_stored_records_above_the_cursors(owner: Owner, database_url: str) -> None:
    (a, _), (first, second) = owner.deployment.intervals_of("readings"), owner.deployment.intervals_of("sums")
    subscription = owner.deployment.subscription_ids["readings", "sums", 0]
    await owner.commit(owner.checkpoint(a, segments=[a_segment(subscription, 1, [a_slice(1, 2), a_slice(3)])]))
    await owner.commit(owner.checkpoint(first, cursors=cursors(owner, 0, a)))

    found = fetch(
        database_url, "SELECT stream, consumer, key_fields, segments, records FROM millpy.backlog WHERE records > 0"
    )

    assert found == [("readings", "sums", ["device"], 1, 1)]
    assert second.index == 1


FOLD_AND_EMPTY = """
    INSERT INTO mill.keyed (interval_id, kind, namespace, key, subkey, key_hash, fire_at, bundle, value)
    SELECT interval_id, kind, namespace, key, subkey, 0, fire_at, bundle, value -> 0 FROM mill.changes;
    UPDATE mill.intervals SET folded_bundle = bundle;
    TRUNCATE mill.deltas;
"""


async def test_accounting_that_spans_a_fold_and_an_emptied_slot_is_complete(owner: Owner, database_url: str) -> None:
    (a, _) = owner.deployment.intervals_of("readings")
    await owner.commit(owner.checkpoint(a, delta=counters(injected=("readings", 5), accepted=("readings", 5))))
    accounted = "SELECT injected, accepted FROM millpy.accounting WHERE source_partition = 'a'"

    with psycopg.connect(database_url) as folding:
        folding.execute("LOCK TABLE mill.deltas IN ACCESS EXCLUSIVE MODE")
        reading = asyncio.create_task(asyncio.to_thread(fetch, database_url, accounted))
        while not await asyncio.to_thread(fetch, database_url, "SELECT 1 FROM pg_locks WHERE NOT granted"):
            assert not reading.done()
        folding.execute(FOLD_AND_EMPTY)

    assert await reading == [(5, 5)]


async def test_watermarks_and_workers_are_shown(owner: Owner, database_url: str) -> None:
    a, b = owner.deployment.intervals_of("readings")
    await advance(owner, a, MINUTE)
    await advance(owner, b, INSTANT_MAX)

    columns = "part, live, bundle, low_watermark::text, lag IS NULL"
    query = f"SELECT {columns} FROM millpy.watermarks WHERE computation = 'readings'"

    assert fetch(database_url, query) == [
        ("source partition a", True, 1, "1970-01-01 00:01:00+00", False),
        ("source partition b", True, 1, "infinity", True),
    ]
    assert fetch(database_url, "SELECT graph, worker_id, live, intervals FROM millpy.workers") == [
        ("factory", owner.worker_id, True, 5)
    ]


async def explain(owner: Owner, url: str, computation: str) -> list[tuple[Any, ...]]:
    query = f"SELECT computation, held_by, detail FROM millpy.explain_watermark('{computation}') ORDER BY step"
    return fetch(url, query)


async def sums_hold(owner: Owner, **changes: Any) -> None:
    """Both sources are at ten minutes and consumed; the first interval of `sums` has work that is older."""
    a, b = owner.deployment.intervals_of("readings")
    for source in (a, b):
        await advance(owner, source, 10 * MINUTE)
    first, second = owner.deployment.intervals_of("sums")
    (alarms,) = owner.deployment.intervals_of("alarms")
    await advance(owner, first, 10 * MINUTE, cursors=cursors(owner, 10 * MINUTE, a, b), **changes)
    await advance(owner, second, 10 * MINUTE, cursors=cursors(owner, 10 * MINUTE, a, b))
    low = min(10 * MINUTE, changes.get("oldest_work", INSTANT_MAX))
    taken = [*cursors(owner, low, first), *cursors(owner, 10 * MINUTE, a, b, second)]
    await advance(owner, alarms, low, cursors=taken)


async def test_open_window_is_named_as_the_cause_downstream(owner: Owner, database_url: str) -> None:
    window = entries(Kind.WINDOW, "", ("dev-7", [1], f"{4 * MINUTE}/{5 * MINUTE}", 6 * MINUTE))
    await sums_hold(owner, oldest_work=Instant(5 * MINUTE - 1), delta=(window,))

    steps = await explain(owner, database_url, "alarms")

    assert steps == [
        ("alarms", "input", "sums, keys 00000000 to 7fffffff"),
        ("sums", "window", 'key "dev-7", window 1970-01-01 00:04:00+00 to 1970-01-01 00:05:00+00'),
    ]


async def test_a_window_whose_trigger_has_not_fired_is_named_with_its_end(owner: Owner, database_url: str) -> None:
    name = f"{4 * MINUTE}/{5 * MINUTE}"
    kept = {"values": [3], "firing": {"trigger": [0], "since": 3, "late": 1, "passed": True, "holds": True}}
    gone = {"values": [3], "pane_index": 1, "emitted": True, "firing": {"trigger": [0], "passed": True}}
    windows = entries(Kind.WINDOW, "", ("dev-1", gone, name, 20 * MINUTE), ("dev-7", kept, name, 20 * MINUTE))
    await sums_hold(owner, oldest_work=Instant(5 * MINUTE - 1), delta=(windows,))

    assert await explain(owner, database_url, "sums") == [
        (
            "sums",
            "window",
            'key "dev-7", window 1970-01-01 00:04:00+00 to 1970-01-01 00:05:00+00 has ended, but its trigger has not'
            " fired for 3 records; it is over at 1970-01-01 00:20:00+00",
        )
    ]
    (held,) = read_facts(database_url, SystemClock()).held_windows
    assert (held["computation"], held["windows"], held["records"], held["held_s"]) == ("sums", 1, 3, 300.0)


async def test_stored_windows_of_a_step_are_counted_for_the_doctor(owner: Owner, database_url: str) -> None:
    names = [f"{n * MINUTE}/{(n + 1) * MINUTE}" for n in (2, 3, 4)]
    windows = [entries(Kind.WINDOW, "", *((key, {}, name, 20 * MINUTE) for key in "ab")) for name in names]
    await sums_hold(owner, oldest_work=Instant(5 * MINUTE - 1), delta=tuple(windows))
    await owner.fold(owner.deployment.intervals_of("sums")[0])
    identity = {"kind": "window", "trigger": {"kind": "never"}}
    async with await psycopg.AsyncConnection.connect(database_url, autocommit=True) as connection:
        described = "UPDATE mill.graphs SET description = jsonb_set(description, '{computations,sums,identity}', %s)"
        await connection.execute(described, [Jsonb(identity)])

    (found,) = read_facts(database_url, SystemClock()).open_windows

    assert (found["computation"], found["windows"], found["unfired"]) == ("sums", 6, 2)
    assert found["identity"] == identity


@pytest.mark.parametrize(("domain", "held_by"), [("event", "timer"), ("hold", "hold")])
async def test_timers_and_holds_are_named_as_causes(owner: Owner, database_url: str, domain: str, held_by: str) -> None:
    timer = entries(Kind.TIMER, domain, ("dev-7", None, "x", 1), ("dev-8", {}, "quiet", 3 * MINUTE))
    await sums_hold(owner, oldest_work=Instant(3 * MINUTE), delta=(timer,))

    steps = await explain(owner, database_url, "sums")

    assert steps == [("sums", held_by, f'key "dev-8", {domain} quiet at 1970-01-01 00:03:00+00')]


async def test_slow_source_partition_is_named(owner: Owner, database_url: str) -> None:
    a, b = owner.deployment.intervals_of("readings")
    first, second = owner.deployment.intervals_of("sums")
    await advance(owner, a, 10 * MINUTE)
    await advance(owner, b, 2 * MINUTE)
    for interval in (first, second):
        taken = [*cursors(owner, 10 * MINUTE, a), *cursors(owner, 2 * MINUTE, b)]
        await advance(owner, interval, 2 * MINUTE, cursors=taken)

    steps = await explain(owner, database_url, "sums")

    assert steps[-1][:2] == ("readings", "source")
    assert "partition b" in steps[-1][2]


async def test_backlog_and_lost_owner_are_named(owner: Owner, database_url: str) -> None:
    for source in owner.deployment.intervals_of("readings"):
        await advance(owner, source, 10 * MINUTE)
    behind = await explain(owner, database_url, "sums")
    await owner.expire()

    lost = await explain(owner, database_url, "sums")

    assert behind == [
        ("sums", "backlog", "consumed up to bundle 0 of readings, source partition a, which has committed up to 1")
    ]
    assert lost[-1][1] == "owner"


async def test_paused_source_is_shown_and_can_be_resumed(owner: Owner, database_url: str) -> None:
    a, _ = owner.deployment.intervals_of("readings")
    await owner.commit(owner.checkpoint(a, pause=Pause("60 of its last 100 records are dead letters")))

    shown = fetch(database_url, "SELECT source_partition, state, paused_because FROM millpy.sources ORDER BY 1")
    (step,) = await explain(owner, database_url, "readings")
    events = fetch(database_url, "SELECT kind, detail ->> 'stream' FROM millpy.events")
    resumed = fetch(database_url, "SELECT millpy.resume_source('factory', 'readings')")

    assert shown == [("a", "paused", "60 of its last 100 records are dead letters"), ("b", "running", None)]
    assert step[1] == "pause"
    assert "source partition a has been paused since" in step[2]
    assert events == [("paused", "readings")]
    assert resumed == [(1,)]
    assert fetch(database_url, "SELECT state FROM millpy.sources") == [("running",), ("running",)]


async def test_unknown_computation_is_refused(owner: Owner, database_url: str) -> None:
    with pytest.raises(psycopg.errors.NoDataFound):
        await explain(owner, database_url, "nothing")


async def test_dead_letters_are_readable(owner: Owner, database_url: str) -> None:
    (interval, _) = owner.deployment.intervals_of("sums")
    dead_letter = DeadLetter("user_error", "boom", b'{"x":"\xff"}', "readings", "sums", event_time=MINUTE, key=b'"a"')
    late = LateRows("readings", "sums", [b'"a"'], [b"{}"], [MINUTE], [3 * MINUTE], [MINUTE], [2 * MINUTE])

    await owner.commit(owner.checkpoint(interval, dead_letters=[dead_letter], late=[late]))

    dead = fetch(database_url, "SELECT graph, reason, event_time::text, payload_text FROM millpy.dead_letters")
    assert dead == [("factory", "user_error", "1970-01-01 00:01:00+00", '{"x":"\\377"}')]
    found = fetch(database_url, "SELECT graph, key, window_end::text, payload_text FROM millpy.late_records")
    assert found == [("factory", '"a"', "1970-01-01 00:02:00+00", "{}")]


async def test_views_of_payloads_can_be_read_by_parallel_plans(owner: Owner, database_url: str) -> None:
    """PostgreSQL chooses such a plan from some megabytes on; up to version 16 no function in it may catch an error."""
    (interval, _) = owner.deployment.intervals_of("sums")
    late = LateRows("readings", "sums", [b'"a"'], [b"{}"], [MINUTE], [3 * MINUTE], [MINUTE], [2 * MINUTE])
    dead = [DeadLetter("user_error", "boom", b"\xff", "readings", "sums")]
    await owner.commit(owner.checkpoint(interval, dead_letters=dead, late=[late]))

    with psycopg.connect(database_url) as connection:
        parallel = "debug_parallel_query" if connection.info.server_version >= 160_000 else "force_parallel_mode"
        connection.execute("SELECT set_config(%s, 'on', false)", (parallel,))
        letters = connection.execute("SELECT payload_text FROM millpy.dead_letters").fetchall()
        records = connection.execute("SELECT payload_text FROM millpy.late_records").fetchall()

    assert (letters, records) == ([("\\377",)], [("{}",)])
    catching = "SELECT proname FROM pg_proc WHERE prosrc ~* 'exception\\s+when' AND proparallel <> 'u'"
    assert fetch(database_url, f"{catching} AND pronamespace::regnamespace::text IN ('mill', 'millpy')") == []


async def test_the_rest_of_a_broken_file_is_replayed_only_as_a_record_that_somebody_made_of_it(
    owner: Owner, database_url: str
) -> None:
    """Its replay would fail, and its reason and detail would be those of the failure."""
    (interval, _) = owner.deployment.intervals_of("sums")
    kept = [DeadLetter(reason, "why", b"at", "readings", "sums") for reason in ("broken_file", "undecodable")]
    await owner.commit(owner.checkpoint(interval, dead_letters=kept))

    def letters() -> list[tuple[Any, ...]]:
        return fetch(database_url, "SELECT reason, state, replayable FROM millpy.dead_letters ORDER BY 1")

    assert letters() == [("broken_file", "open", False), ("undecodable", "open", True)]
    assert fetch(database_url, "SELECT millpy.replay_dead_letters(ARRAY[1, 2])") == [(1,)]
    assert letters() == [("broken_file", "open", False), ("undecodable", "requested", True)]
    assert fetch(database_url, "SELECT millpy.replay_dead_letter(1, '{}')") == [(1,)]
    assert letters()[0] == ("broken_file", "requested", True)


def source_at(now_us: int, *, newest_s: float, arrived_s: float) -> Entries:
    """The stored position of a source: when its newest record was made and when it arrived, before now."""
    position = {"max_event_time": round(now_us - newest_s * 1e6), "arrived_at": round(now_us - arrived_s * 1e6)}
    return entries(Kind.POSITION, "source", ("", position))


@pytest.mark.parametrize(
    ("newest_s", "arrived_s", "verdict"),
    [
        (1, 0.5, "; nothing is wrong: this lag is max_disorder"),
        (3_600, 1, "; it arrived 00:59:59 after its event time"),
        (3_600, 3_599, "; no record has arrived for 00:59:59"),
    ],
)
async def test_lag_of_a_source_is_explained(
    owner: Owner, database_url: str, newest_s: float, arrived_s: float, verdict: str
) -> None:
    a, b = owner.deployment.intervals_of("readings")
    now_us = SystemClock().now_us()
    await advance(owner, b, INSTANT_MAX)
    low = round(now_us - newest_s * 1e6) - 30_000_000
    await advance(owner, a, low, delta=(source_at(now_us, newest_s=newest_s, arrived_s=arrived_s),))

    ((_, held_by, detail),) = await explain(owner, database_url, "readings")

    assert held_by == "source"
    assert ", and the watermark is 00:00:30 behind it, the disorder bound; " in detail
    assert verdict.split("00:59")[0] in detail
    await advance(owner, a, round(now_us - newest_s * 1e6) + 1)
    ((_, _, detail),) = await explain(owner, database_url, "readings")
    assert ", and the clock has moved the watermark" in detail
    assert "nothing is wrong" not in detail


async def test_disconnected_source_is_shown_explained_and_told_by_the_doctor(owner: Owner, database_url: str) -> None:
    a, b = owner.deployment.intervals_of("readings")
    await advance(owner, b, INSTANT_MAX)
    away = SourceReport(a.interval_id, False, Instant(MINUTE), "nothing listens\x00", 3)
    await owner.store.report_sources(owner.worker_id, [away, SourceReport(b.interval_id, True, Instant(5), "", 0)])
    await owner.store.report_sources(uuid4(), [SourceReport(a.interval_id, True, Instant(5), "", 0)])
    later = replace(away, since_us=Instant(2 * MINUTE), attempts=4)
    await owner.store.report_sources(owner.worker_id, [later])

    columns = "state, connected, connection_since::text, disconnected_because, attempts"
    shown = fetch(database_url, f"SELECT {columns} FROM millpy.sources ORDER BY source_partition")
    ((_, held_by, detail),) = await explain(owner, database_url, "readings")
    found = read_facts(database_url, SystemClock()).disconnected

    since, why = "1970-01-01 00:01:00+00", shown[0][3]
    assert why.startswith("nothing listens")
    assert shown[0] == ("disconnected", False, since, why, 4), "an outage keeps its beginning"
    assert shown[1][:2] == ("ended", True)
    assert (held_by, detail) == (
        "disconnected",
        f"source partition a has no connection since {since}, after 4 failed attempts: {why}",
    )
    assert [(row["stream"], row["partitions"], row["attempts"]) for row in found] == [("readings", 1, 4)]
    await owner.expire()
    left = fetch(database_url, "SELECT state, connected FROM millpy.sources ORDER BY source_partition")
    assert left[0] == ("without a worker", False)


async def test_no_site_is_behind_the_watermark_that_its_source_has_reached(owner: Owner, database_url: str) -> None:
    (source, _) = owner.deployment.intervals_of("readings")
    sites = Entries(Kind.SITE, "source")
    sites.add(b'""', 0, "floor", b"%d" % MINUTE)
    for name, watermark in (("oslo", MINUTE // 2), ("rome", 2 * MINUTE)):
        sites.add(b'""', 0, f'"{name}"', b'{"watermark": %d, "max_event_time": 1, "arrived_at": 1}' % watermark)
    await owner.commit(owner.checkpoint(source, delta=[sites]))

    found = fetch(
        database_url, "SELECT site, extract(epoch FROM watermark)::int FROM millpy.site_watermarks ORDER BY 1"
    )

    assert found == [("oslo", 60), ("rome", 120)]


HOURS = """
    INSERT INTO mill.device_hours (table_id, device, bucket, hour, windows, measured, records, late, mean, stddev,
                                   first_at, last_at)
    SELECT %s, 'd', h.bucket, to_timestamp(h.bucket), h.windows, h.measured, 10, 1, h.mean, h.stddev, now(), now()
      FROM unnest(%s::bigint[], %s::bigint[], %s::bigint[], %s::float8[], %s::float8[])
        AS h (bucket, windows, measured, mean, stddev)
"""


@pytest.mark.parametrize(
    ("hours", "stddev"),
    [
        ([[1.0], [2.0], [6.0]], statistics.stdev([1.0, 2.0, 6.0])),
        ([[1.0, 3.0], [2.0], []], statistics.stdev([1.0, 3.0, 2.0])),
        ([[1.0], []], None),
        ([[], []], None),
    ],
    ids=["a window an hour", "several", "one window", "none"],
)
def test_profile_spreads_like_all_its_windows(
    owner: Owner, database_url: str, hours: list[list[float]], stddev: float | None
) -> None:
    table_id = owner.deployment.table_ids["sums_1m"]
    columns = [
        list(range(len(hours))),
        [max(1, len(values)) for values in hours],
        [len(values) for values in hours],
        [statistics.mean(values) if values else None for values in hours],
        [statistics.stdev(values) if len(values) > 1 else None for values in hours],
    ]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO mill.analytics (table_id, query, epoch) VALUES (%s, '', 1)", [table_id])
        connection.execute(HOURS, [table_id, *columns])

    ((shown, found),) = fetch(database_url, "SELECT hours, stddev FROM millpy.device_profiles")

    assert (shown, found) == (len(hours), stddev if stddev is None else pytest.approx(stddev))

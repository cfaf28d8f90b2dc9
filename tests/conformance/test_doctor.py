"""`millpy doctor` finds faults of a real database; tests/unit/test_doctor.py tests its verdicts."""

from __future__ import annotations

import json
from contextlib import ExitStack

import msgspec
import numpy as np
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from millpy.admin.diagnosis import read_facts
from millpy.admin.doctor import examine
from millpy.cli.app import app
from millpy.clock import SystemClock
from millpy.embedded import EmbeddedPostgres
from millpy.ingest.disorder import Disorder
from millpy.ingest.settings import EventTime
from millpy.ingest.site_watermarks import SiteColumn, SiteWatermarks
from millpy.ingest.source_position import SourcePosition
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter, DedupeRun, Entries, Kind, LateRows
from millpy.model.finding import Severity
from millpy.model.time import INSTANT_MIN, Instant, seconds
from millpy.store.postgres import pooler_check as pooling
from millpy.store.postgres.deployment.migrate import migrate
from millpy.store.postgres.statements import statement
from millpy.store.postgres.store import PostgresStore
from tests.conformance.store_builders import Owner, a_graph, a_segment, a_slice, entries


def found(url: str) -> dict[str, tuple[Severity, str]]:
    return {f.check: (f.severity, f.found) for f in examine(read_facts(url, SystemClock()), Limits())}


def test_an_empty_database_gets_the_hint_to_migrate(empty_database_url: str) -> None:
    severity, text = found(empty_database_url)["tables"]

    assert severity is Severity.ERROR
    assert "are missing" in text


def test_a_migrated_database_has_no_errors(database_url: str) -> None:
    judged = found(database_url)

    assert [check for check, (severity, _) in judged.items() if severity is Severity.ERROR] == []
    assert judged["tables"][0] is Severity.OK
    assert judged["pooler"][0] is Severity.OK
    assert judged["accounting"] == (Severity.OK, "adds up")


@pytest.mark.parametrize("may_read", [False, True])
def test_a_role_without_the_rights_of_a_worker_learns_which_it_lacks(database_url: str, may_read: bool) -> None:
    granted = ["GRANT USAGE ON SCHEMA millpy TO looks_on"] if may_read else []
    change(database_url, "CREATE ROLE looks_on LOGIN", *granted)
    try:
        judged = found(make_conninfo(database_url, user="looks_on"))
    finally:
        change(database_url, "DROP OWNED BY looks_on", "DROP ROLE looks_on")

    lacking = "" if may_read else "USAGE on schema millpy, "
    said = f"looks_on lacks USAGE on schema mill, {lacking}UPDATE on mill.intervals, INSERT on mill.deltas"
    assert judged["rights"] == (Severity.WARNING, said)
    assert "tables" not in judged


def change(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)  # type: ignore[call-overload]


async def test_a_dead_worker_and_its_intervals_are_named(owner: Owner, database_url: str) -> None:
    assert found(database_url)["graph"][0] is Severity.OK

    change(database_url, "UPDATE mill.workers SET lease_deadline = clock_timestamp() - interval '1 hour'")
    judged = found(database_url)

    assert judged["expired lease"][0] is Severity.WARNING
    assert "of factory" in judged["expired lease"][1]
    assert judged["graph"][0] is Severity.WARNING
    assert "have no owner" in judged["graph"][1]


async def test_a_paused_source_is_named_with_the_command_that_resumes_it(owner: Owner, database_url: str) -> None:
    source = owner.deployment.intervals_of("readings")[0]
    change(database_url, f"INSERT INTO mill.pauses VALUES ({source.interval_id}, 1, 'too many dead letters')")

    (finding,) = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "paused source"]

    assert finding.found == "factory.readings, 1 of its partitions: too many dead letters"
    assert finding.action.endswith("`millpy sources resume readings factory`")


async def test_a_percentile_beyond_the_largest_bound_is_reported(owner: Owner, database_url: str) -> None:
    for source, max_disorder in zip(owner.deployment.intervals_of("readings"), (3, 5), strict=True):
        learned = Disorder(EventTime("at", max_disorder=seconds(max_disorder), percentile=0.99))
        newest = np.full(200_001, 100_000_000)
        times = newest[1:] - np.where(np.arange(200_000) % 50, 0, 4_000_000)
        learned.take(newest, times, Instant(INSTANT_MIN), Instant(INSTANT_MIN))
        await owner.commit(owner.checkpoint(source, delta=learned.entries()))

    findings = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "percentile"]
    with psycopg.connect(database_url) as connection:
        explained = connection.execute("SELECT detail FROM millpy.explain_watermark('factory', 'readings')").fetchall()

    assert [finding.found for finding in findings] == [
        "factory.readings (a): max_disorder of 00:00:03 covers 98.00% of its newest records, less than percentile=0.99"
    ]
    assert explained[0][0].endswith("; it waits for records up to 3 s behind, learned with percentile 0.99")


async def test_times_of_1970_that_are_of_now_in_a_coarser_unit_are_reported(owner: Owner, database_url: str) -> None:
    now = SystemClock().now_us()
    for interval, newest in zip(owner.deployment.intervals_of("readings"), (now // 1_000, 35_000_000), strict=True):
        position = Entries(Kind.POSITION, "source")
        position.add(b'""', 0, "", msgspec.json.encode(SourcePosition(arrived_at=now, newest_event_time=newest)))
        await owner.commit(owner.checkpoint(interval, delta=[position]))

    (finding,) = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "unit"]

    assert finding.severity is Severity.WARNING
    assert finding.found.startswith("factory.readings (a): its newest record is of 1970-01-")


async def test_silent_sites_and_those_beyond_the_bound_are_reported(owner: Owner, database_url: str) -> None:
    source, sites, now = (
        owner.deployment.intervals_of("readings")[0],
        SiteWatermarks(5_000_000, 2),
        SystemClock().now_us(),
    )
    for name, at in (('"oslo"', now - 7_200_000_000), ('"rome"', now), ('"ulm"', now)):
        column = SiteColumn(np.zeros(1, np.int64), [name])
        sites.take(column, np.array([at]), arrived_at=Instant(at), elapsed_us=0)
    await owner.commit(owner.checkpoint(source, delta=sites.take_entries()))

    findings = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "sites"]

    silent, beyond = (finding.found for finding in findings)
    assert silent.startswith(
        "factory.readings (a): 1 site has sent nothing for an hour; the longest silent is oslo, since"
    )
    assert beyond == "factory.readings (a): more than 2 sites; records of the later ones: 1"


def test_only_what_keeps_rows_here_is_an_old_snapshot(postgres: EmbeddedPostgres, database_url: str) -> None:
    query = statement("look_for_old_snapshots").replace(b"1 minute", b"0 s")
    with ExitStack() as stack:
        here, reads_elsewhere, writes_elsewhere = (
            stack.enter_context(psycopg.connect(url)) for url in (database_url, postgres.url(), postgres.url())
        )
        for connection in (here, reads_elsewhere):
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            connection.execute("SELECT")
        writes_elsewhere.execute("SELECT pg_current_xact_id()")  # each snapshot, of any database, knows it as open

        with psycopg.connect(database_url, autocommit=True) as connection:
            shown = {row[1] for row in connection.execute(query).fetchall()}

        pids = [str(one.info.backend_pid) for one in (here, writes_elsewhere, reads_elsewhere)]
        assert [pid in shown for pid in pids] == [True, True, False]


async def test_a_worker_that_rejects_a_clock_step_is_named_until_it_agrees(owner: Owner, database_url: str) -> None:
    def tell(kind: str) -> None:
        change(
            database_url,
            "INSERT INTO mill.events (graph_id, kind, detail)"
            f" SELECT graph_id, '{kind}', jsonb_build_object('worker', worker_id, 'ahead_s', 3600) FROM mill.workers",
        )

    tell("clock_refused")
    refused = found(database_url)["worker's clock"]
    tell("clock_agrees")

    assert refused[0] is Severity.WARNING
    assert "of factory" in refused[1]
    assert "worker's clock" not in found(database_url)


def test_a_slot_without_a_reader_is_judged_once(database_url: str) -> None:
    """A logical slot keeps no rows of tables, so it slows no commit down."""
    change(
        database_url,
        "SELECT pg_create_logical_replication_slot('millpy_own_gone', 'pgoutput')",
        "SELECT pg_create_physical_replication_slot('standby', true)",
    )
    try:
        judged = examine(read_facts(database_url, SystemClock()), Limits())
    finally:
        change(database_url, *(f"SELECT pg_drop_replication_slot('{slot}')" for slot in ("millpy_own_gone", "standby")))

    own, other = ([f for f in judged if slot in f.found] for slot in ("millpy_own_gone", "slot standby"))
    assert [(f.check, f.severity) for f in (*own, *other)] == [("replication slot", Severity.WARNING)] * 2
    assert "its source is gone" in own[0].found and "nobody reads it" in other[0].found
    assert "commits get slower" not in own[0].meaning + other[0].meaning


@pytest.mark.parametrize("ring", ["segments", "deltas"])
async def test_a_slot_that_cannot_be_freed_is_reported_with_its_reader(
    owner: Owner, database_url: str, ring: str
) -> None:
    source = owner.deployment.intervals_of("readings")[0]
    if ring == "segments":
        subscription = owner.deployment.subscription_ids["readings", "sums", 0]
        await owner.commit(owner.checkpoint(source, segments=[a_segment(subscription, 1, [a_slice(1), a_slice(2)])]))
    else:
        await owner.commit(owner.checkpoint(source, delta=(entries(Kind.STATE, "usual", ("a", 1)),)))
    change(
        database_url,
        f"UPDATE mill.epochs SET state = 'filled', started_at = clock_timestamp() - interval '1 hour'"
        f" WHERE ring = '{ring}' AND slot < 14",
        f"UPDATE mill.epochs SET state = 'current', started_at = clock_timestamp() WHERE ring = '{ring}' AND slot = 14",
    )

    findings = [f for f in examine(read_facts(database_url, SystemClock()), Limits()) if f.check == "ring"]

    (full,) = [f for f in findings if f.severity is Severity.WARNING]
    assert full.found.startswith(f"{ring}: 15 of 16 slots")
    assert ("factory.sums" if ring == "segments" else "factory.readings") in full.found


async def test_computations_whose_ids_are_dead_do_not_need_a_slot(owner: Owner, database_url: str) -> None:
    old, live = DedupeRun(bytes(16), bytes(8), Instant(100), Instant(90)), Instant(1_000)
    later = {
        "readings": DedupeRun(bytes(16), bytes(8), live, Instant(95)),
        "sums": DedupeRun(bytes(16), bytes(8), live, Instant(101)),
        "alarms": DedupeRun(bytes(16), bytes(8), live, Instant(95), whole=True),
    }
    for computation, run in later.items():
        interval = owner.deployment.intervals_of(computation)[0]
        for one in (old, run):
            await owner.commit(owner.checkpoint(interval, dedupe_run=one))
    change(database_url, "UPDATE mill.dedupe_runs SET slot = 1 WHERE bundle = 2")

    with psycopg.connect(database_url) as connection:
        needed = connection.execute(statement("look_who_needs_dedupe_runs"), {"slot": 0}).fetchall()

    assert needed == [("factory", "readings")]


async def test_records_that_are_settled_or_old_are_not_counted(owner: Owner, database_url: str) -> None:
    interval = owner.deployment.intervals_of("sums")[0]
    dead = [DeadLetter("user_error", "boom", b"{}", "readings", "sums") for _ in range(5)]
    late = LateRows("readings", "sums", *[[value] * 5 for value in (b'"a"', b"{}", 1, 3, 1, 2)])
    await owner.commit(owner.checkpoint(interval, dead_letters=dead, late=[late]))
    for table, number, at in (("dead_letters", "dead_letter_id", "dead_lettered_at"),
                              ("late_records", "late_record_id", "recorded_at")):  # fmt: skip
        change(
            database_url,
            f"UPDATE mill.{table} SET state = s.name FROM (VALUES (2, 'requested'), (3, 'replayed'), (4, 'discarded'))"
            f" AS s (place, name) WHERE {number} = (SELECT min({number}) - 1 + s.place FROM mill.{table})",
            f"UPDATE mill.{table} SET {at} = {at} - interval '2 hours'"
            f" WHERE {number} = (SELECT max({number}) FROM mill.{table})",
        )

    judged = found(database_url)

    assert judged["dead letters"] == (Severity.NOTE, "factory.readings: 2 in the last hour")
    assert judged["late records"] == (Severity.NOTE, "factory.readings: 2 in the last hour")


async def test_accounting_that_does_not_add_up_is_an_error_with_an_exit_status(owner: Owner, database_url: str) -> None:
    assert CliRunner().invoke(app, ["doctor", "--database", database_url]).exit_code == 0

    source = owner.deployment.intervals_of("readings")[0]
    lost = entries(Kind.COUNTER, "injected", ('""', 5, "readings"))
    await owner.commit(owner.checkpoint(source, delta=(lost,)))
    result = CliRunner().invoke(app, ["doctor", "--database", database_url, "--quiet", "--json"])

    assert result.exit_code == 1
    (error,) = [finding for finding in json.loads(result.stdout) if finding["severity"] == "error"]
    assert error["check"] == "accounting"
    assert "factory.readings" in error["found"]


async def test_workers_under_a_superuser_are_named(owner: Owner, database_url: str) -> None:
    assert "workers run as millpy, a superuser" in found(database_url)["roles"][1]


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("REVOKE INSERT ON factory.sums_1m FROM millpy_worker", "may not read and write factory.sums_1m"),
        ("DROP POLICY millpy_worker ON factory.sums_1m", "row-level security of factory.sums_1m"),
        ("DROP TABLE factory.sums_1m CASCADE", "factory.sums_1m is gone"),
    ],
)
async def test_a_result_table_that_workers_cannot_write_to_is_found(
    database_url: str, statement: str, words: str
) -> None:
    migrate(database_url, "millpy")
    async with PostgresStore(database_url) as store:
        await store.deploy(a_graph())
    change(database_url, "ALTER TABLE factory.sums_1m ENABLE ROW LEVEL SECURITY")
    assert "result table" not in found(database_url)

    change(database_url, statement)

    assert words in found(database_url)["result table"][1]


def test_a_direct_connection_is_not_mistaken_for_a_transaction_pool(database_url: str) -> None:
    assert not pooling.pooler_shares(database_url)

"""What `millpy doctor` makes of facts; that they are read right is in tests/conformance/test_doctor.py."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from millpy.admin.diagnosis import Facts
from millpy.admin.doctor import examine
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity
from millpy.store.revision import newer_database_error, older_database_error

SERVER: dict[str, Any] = {
    "version": 180004,
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "synchronous_standby_names": "standby",
    "max_connections": 100,
    "reserved_connections": 3,
    "connections": 10,
    "wal_bytes_max": 2_000_000_000,
    "checkpoint_s": 300.0,
    "autovacuum": "on",
    "database_bytes": 10_000_000,
    "is_superuser": "off",
    "role": "worker",
    "backend_pid": 7,
    "address": "10.0.0.1/32",
    "encrypted": True,
    "server_time": 0.0,
    "in_recovery": False,
    "data_directory": None,
    "migrated": True,
}


def judged(*, server: dict[str, Any] | None = None, **changes: Any) -> dict[str, Finding]:
    facts = Facts(
        **{
            "client_pid": 7,
            "clock_difference_s": 0.0,
            "round_trip_s": 0.001,
            "server": SERVER | (server or {}),
            "old_snapshots": [],
        }
        | changes
    )
    return {finding.check: finding for finding in examine(facts, Limits())}


def test_a_healthy_server_has_no_warning() -> None:
    assert {f.severity for f in judged().values()} <= {Severity.OK, Severity.NOTE}


@pytest.mark.parametrize(
    ("server", "check", "severity", "words"),
    [
        ({"version": 140011}, "server", Severity.ERROR, "15 or newer"),
        ({"version": 190001}, "server", Severity.NOTE, "15 to 18"),
        ({"in_recovery": True}, "server", Severity.ERROR, "cannot write"),
        ({"fsync": "off"}, "fsync", Severity.ERROR, "acknowledged"),
        ({"full_page_writes": "off"}, "full_page_writes", Severity.ERROR, "corrupt"),
        ({"synchronous_commit": "off"}, "synchronous_commit", Severity.NOTE, "its own commits"),
        ({"synchronous_standby_names": ""}, "replication", Severity.NOTE, "failover"),
        ({"connections": 86}, "connections", Severity.WARNING, "takes over"),
        ({"connections": 94}, "connections", Severity.ERROR, "takes over"),
        ({"wal_bytes_max": 64_000_000}, "max_wal_size", Severity.NOTE, "checkpoint"),
        ({"checkpoint_s": 30.0}, "checkpoint_timeout", Severity.NOTE, "whole"),
        ({"autovacuum": "off"}, "autovacuum", Severity.ERROR, "grow"),
        ({"encrypted": False}, "encryption", Severity.WARNING, "in transit"),
        ({"is_superuser": "on"}, "role", Severity.NOTE, "far fewer"),
        ({"migrated": False}, "tables", Severity.ERROR, "graphs cannot run"),
    ],
)
def test_an_unhealthy_server_has_findings(server: dict[str, Any], check: str, severity: Severity, words: str) -> None:
    finding = judged(server=server)[check]

    assert finding.severity is severity
    assert words in finding.meaning
    assert finding.action


def test_a_pooler_is_detected_by_its_unknown_process() -> None:
    assert judged(client_pid=8, pool_spares=7)["pooler"].severity is Severity.NOTE


def test_a_pool_that_is_too_small_for_a_worker_is_a_warning() -> None:
    finding = judged(client_pid=8, pool_spares=6)["pooler"]

    assert finding.severity is Severity.WARNING
    assert "default_pool_size" in finding.action


def test_a_pool_in_transaction_mode_is_an_error() -> None:
    finding = judged(client_pid=8, pools_transactions=True)["pooler"]

    assert finding.severity is Severity.ERROR
    assert "session mode" in finding.action


TABLE = {"graph": "factory", "table": "sums", "found": True, "granted": True, "let_in": True}
WITHOUT_ROLES = {"granted": None, "let_in": None}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"found": False, **WITHOUT_ROLES}, "is gone"),
        ({"granted": False}, "may not read and write"),
        ({"let_in": False}, "no policy"),
    ],
)
def test_a_result_table_that_workers_cannot_write_to_is_an_error(row: dict[str, Any], words: str) -> None:
    finding = judged(result_tables=[TABLE | row])["result table"]

    assert finding.severity is Severity.ERROR
    assert words in finding.found


@pytest.mark.parametrize("row", [{}, WITHOUT_ROLES])
def test_a_sound_result_table_is_no_finding(row: dict[str, Any]) -> None:
    assert "result table" not in judged(result_tables=[TABLE | row])


def test_workers_with_more_rights_than_they_need_are_named() -> None:
    login = {"login": "admin", "superuser": False, "owns": False}
    finding = judged(logins=[login | {"superuser": True}])["roles"]

    assert finding.action == "run `millpy migrate --roles`"
    assert "admin, a superuser" in finding.found
    assert "roles" not in judged(logins=[login])


def checks_of(tree: ast.Module) -> set[str]:
    """Names of the checks of a module: the first text that each finding is made with, or the constant that holds it."""
    named = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("Finding", "_ok"):
            check = node.args[1 if node.func.id == "Finding" else 0]
            found |= {check.value} if isinstance(check, ast.Constant) else {named.get(ast.unparse(check))}
    return {str(check) for check in found if check is not None}


def test_every_finding_is_in_the_documentation() -> None:
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "doctor.md").read_text()
    modules = [path for path in (root / "millpy").rglob("*.py") if "testing" not in path.parts]
    checks = set[str]().union(*(checks_of(ast.parse(path.read_text())) for path in modules))

    assert {"HTTP access", "replication slot", "windows in memory"} <= checks
    assert [check for check in sorted(checks) if f"| {check} |" not in page] == []


@pytest.mark.parametrize(("difference", "severity"), [(0.5, Severity.OK), (-1.5, Severity.WARNING)])
def test_a_wrong_clock_is_named(difference: float, severity: Severity) -> None:
    assert judged(clock_difference_s=difference)["clock"].severity is severity


@pytest.mark.parametrize(
    ("kind", "words"), [("clock_refused", "ignores a step"), ("clock_doubted", "which clock is right")]
)
def test_a_worker_that_rejects_the_servers_clock_is_named(kind: str, words: str) -> None:
    output = {"graph": "plant", "worker": "0123456789", "host": "pi", "kind": kind, "ahead_s": 3600.0, "since_s": 50.0}

    finding = judged(clocks=[output])["worker's clock"]

    assert finding.severity is Severity.WARNING
    assert words in finding.found
    assert "worker 01234567 of plant on pi" in finding.found
    assert "+3600 s, 50 s ago" in finding.found


def test_a_slow_round_trip_is_not_mistaken_for_a_wrong_clock() -> None:
    assert judged(clock_difference_s=1.5, round_trip_s=2.0)["clock"].severity is Severity.OK


def test_holder_of_an_old_snapshot_is_named_with_a_remedy() -> None:
    row = {"kind": "session", "name": "4711", "role": "bi", "application": "psql", "state": "idle in transaction"}
    finding = judged(old_snapshots=[row | {"age_s": 7300.0}])["old snapshot"]

    assert finding.severity is Severity.WARNING
    assert finding.found == "session 4711 (bi, psql, idle in transaction) for 2 h 1 min"
    assert "pg_terminate_backend(4711)" in finding.action


def test_an_older_schema_gets_the_hint_to_migrate_and_a_newer_one_to_install() -> None:
    rights = {"may_create_schemas": True} | dict.fromkeys(
        ("may_use_mill", "may_commit", "may_append", "may_read_views", "is_owner"), True
    )
    older = judged(unfit=older_database_error("0001"), rights=rights)["tables"]
    newer = judged(unfit=newer_database_error("9999"), rights=rights)["tables"]

    assert older.action == "run `millpy migrate` as the owner"
    assert newer.action.startswith("install the millpy that migrated it")


def test_missing_rights_are_named() -> None:
    rights = {"may_create_schemas": False, "may_commit": False, "may_append": True, "is_owner": False}
    finding = judged(revision="0003", rights=rights | {"may_use_mill": True, "may_read_views": True})["rights"]

    assert finding.found == "worker lacks UPDATE on mill.intervals"


def test_unfolded_state_is_a_warning() -> None:
    graph = {
        "graph": "factory", "generation": 1, "beside": False, "intervals": 9, "ownerless": 0, "finished": False,
        "unfolded_bytes": 200_000_000,
    }  # fmt: skip

    assert judged(graphs=[graph])["unfolded state"].severity is Severity.WARNING


def test_dead_letters_are_counted_with_a_hint_where_to_look() -> None:
    row = {"kind": "dead letter", "graph": "factory", "stream": "readings", "count": 5_000, "not_kept": 0}

    assert judged(dead_letters=[row])["dead letters"].action == "read the view millpy.dead_letters"


LEARNED = {
    "graph": "factory", "stream": "readings", "source_partition": "all", "percentile": 0.99, "max_disorder": "00:05:00",
    "records": 200_000, "late_by_percentile": 2_500, "within": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"late_by_percentile": 9_000}, "4.50% of its records were late because of percentile=0.99"),
        (
            {"within": 0.9},
            "max_disorder of 00:05:00 covers 90.00% of its newest records, less than percentile=0.99",
        ),
    ],
)
def test_percentile_that_does_not_fit_the_feed_is_a_warning(row: dict[str, Any], found: str) -> None:
    finding = judged(disorder=[LEARNED | row])["percentile"]

    assert (finding.severity, finding.found) == (Severity.WARNING, f"factory.readings (all): {found}")


@pytest.mark.parametrize(
    "row", [{}, {"within": 0.99}, {"records": 100_000, "late_by_percentile": 9_000, "within": 0.5}]
)
def test_percentile_that_fits_or_has_seen_little_is_no_finding(row: dict[str, Any]) -> None:
    assert "percentile" not in judged(disorder=[LEARNED | row])


ARCHIVE = {"graph": "factory", "archive": "all", "pending": 7, "pending_bytes": 2_000_000, "live": True, "why": None}


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"live": False}, "factory.all: 7 records wait (2.0 MB); nothing archives them"),
        ({"why": "No space left"}, "factory.all: 7 records wait (2.0 MB); its place cannot be written: No space left"),
        ({"why": "No space left", "live": False}, "factory.all: 7 records wait (2.0 MB); nothing archives them"),
    ],
)
def test_archive_for_which_records_wait_in_vain_is_a_warning(row: dict[str, Any], found: str) -> None:
    finding = judged(archives=[ARCHIVE | row])["archive"]

    assert (finding.severity, finding.found) == (Severity.WARNING, found)


@pytest.mark.parametrize("row", [{}, {"pending": 0, "live": False}, {"pending": 0, "why": "No space left"}])
def test_archive_that_keeps_up_is_no_finding(row: dict[str, Any]) -> None:
    assert judged(archives=[ARCHIVE | row])["archive"].severity is Severity.OK


AUDITS = {"graph": "factory", "result_table": "sums", "hours": 30, "differences": 0, "hours_that_differ": 0,
          "first_hour": None, "behind_s": 0.0}  # fmt: skip


def test_rows_that_differ_from_their_history_are_an_error_and_an_auditor_that_lags_a_warning() -> None:
    wrong = {"differences": 7, "hours_that_differ": 2, "first_hour": "2026-11-20 08:00:00+00"}

    assert judged(audits=[AUDITS])["audits"].severity is Severity.OK
    found = judged(audits=[AUDITS, AUDITS | wrong | {"behind_s": 7_201.0}])
    assert found["audit"].severity is Severity.ERROR
    assert "factory.sums: 7 rows in 2 hours differ" in found["audit"].found
    assert found["audits behind"].severity is Severity.WARNING
    assert "audits" not in found


@pytest.mark.parametrize(
    ("apart_s", "severity", "words"),
    [
        (5.0, Severity.OK, "shop.paid keeps 3.0 MB"),
        (None, Severity.OK, "shop.paid keeps 3.0 MB"),
        (9_000.0, Severity.WARNING, "payments is 2 h 30 min behind the other side"),
    ],
)
def test_a_join_whose_sides_are_far_apart_is_told(apart_s: float | None, severity: Severity, words: str) -> None:
    row = {"graph": "shop", "computation": "paid", "bytes": 3_000_000, "apart_s": apart_s, "slowest": "payments"}

    finding = judged(joins=[row])["join"]

    assert finding.severity is severity
    assert words in finding.found


NEVER, ONCE = {"kind": "never"}, {"kind": "after_count", "n": 1}


@pytest.mark.parametrize(
    ("trigger", "fires"),
    [
        (NEVER, False),
        (ONCE, True),
        ({"kind": "after_watermark", "late": {"kind": "nothing"}}, True),
        ({"kind": "repeatedly", "trigger": NEVER}, False),
        ({"kind": "after_all", "triggers": [ONCE, NEVER]}, False),
        ({"kind": "after_any", "triggers": [NEVER, ONCE]}, True),
        ({"kind": "after_each", "triggers": [NEVER, ONCE]}, False),
        ({"kind": "after_each", "triggers": [ONCE, NEVER]}, True),
        ({"kind": "or_finally", "trigger": NEVER, "until": ONCE}, True),
        ({"kind": "or_finally", "trigger": NEVER, "until": NEVER}, False),
    ],
)
def test_a_trigger_that_cannot_fire_is_noted(trigger: Any, fires: bool) -> None:
    row = {"graph": "bills", "computation": "hours", "trigger": trigger, "allowed_lateness_us": 3_600_000_000}

    found = judged(window_triggers=[row])

    assert ("trigger of windows" in found) is not fires
    assert fires or "1 h" in found["trigger of windows"].meaning or "hours(1)" in found["trigger of windows"].meaning


@pytest.mark.parametrize(("held_s", "warned"), [(59.0, False), (7_200.0, True)])
def test_windows_that_hold_the_watermark_for_long_are_told(held_s: float, warned: bool) -> None:
    name = {"graph": "bills", "computation": "hours"}
    step = {**name, "trigger": {"kind": "repeatedly", "trigger": ONCE}, "allowed_lateness_us": 0}
    held = {**name, "windows": 3, "records": 5_000, "held_s": held_s, "over_at": "2026-01-01 00:00:00+00"}

    finding = judged(window_triggers=[step], held_windows=[held]).get("windows")

    assert (finding is not None) is warned
    if finding is not None:
        assert "bills.hours: 3 windows with 5,000 records that no pane has" in finding.found
        assert "Repeatedly(AfterCount(1)) has not fired" in finding.meaning


PLAIN = {
    "kind": "window",
    "window": {"kind": "fixed", "size_us": 60_000_000},
    "stored_form": "whole windows",
    "trigger": {"kind": "after_watermark"},
    "aggregates": [["n", {"kind": "count", "field": None}]],
}
EARLY_COUNTS = {"kind": "after_watermark", "early": {"kind": "repeatedly", "trigger": ONCE}}
EARLY_TICKS = {
    "kind": "after_watermark",
    "early": {"kind": "after_any", "triggers": [ONCE, {"kind": "every", "period_us": 10_000_000}]},
}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"trigger": EARLY_COUNTS}, None),
        ({"trigger": EARLY_TICKS}, "AfterWatermark(early=AfterAny(AfterCount(1), Every("),
        ({"trigger": {"kind": "repeatedly", "trigger": ONCE}}, "Repeatedly(AfterCount(1)) keeps its panes there"),
        ({"trigger": EARLY_COUNTS, "window": {"kind": "session", "gap_us": 1}}, "a trigger of sessions"),
        ({"stored_form": "slices"}, "slices"),
        ({"takes_retractions": True}, "they subtract retractions"),
        ({"final_pane": "always"}, "empty panes"),
        ({"window": {"kind": "window_function"}}, "a function of yours"),
        ({"timestamp_combiner": "latest"}, "combine the times"),
        ({"aggregates": [["all", {"kind": "collect", "field": "x"}]]}, "may be long (collect)"),
    ],
)
def test_windows_that_fill_the_memory_and_cannot_leave_it_are_told(changes: dict[str, Any], why: str | None) -> None:
    half = Limits().open_windows_bytes_max // 2
    row = {"graph": "bills", "computation": "hours", "identity": PLAIN | changes}
    some, many = {"windows": 1_000, "unfired": 1_000}, {"windows": half // 600, "unfired": half // 600}

    assert "windows in memory" not in judged(open_windows=[row | some])
    finding = judged(open_windows=[row | many]).get("windows in memory")

    assert (finding is None) is (why is None)
    if finding is not None and why is not None:
        assert f"bills.hours: {half // 600:,} open windows stay in memory" in finding.found
        assert why in finding.meaning


def test_windows_that_leave_memory_when_they_have_fired_count_until_then() -> None:
    many = Limits().open_windows_bytes_max // 600
    row = {"graph": "bills", "computation": "hours", "windows": many, "unfired": 10}

    assert "windows in memory" not in judged(open_windows=[row | {"identity": PLAIN | {"stored_form": "slices"}}])
    assert "windows in memory" in judged(open_windows=[row | {"identity": PLAIN | {"takes_retractions": True}}])

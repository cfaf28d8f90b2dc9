"""Judge the facts about a database. Each finding says what it means and what to do. This module reads nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from millpy.admin.diagnosis import CONNECTIONS_PER_WORKER, Facts
from millpy.admin.doctor_connections import judge_connections
from millpy.admin.doctor_disorder import judge_disorder
from millpy.admin.doctor_injections import judge_injections
from millpy.admin.doctor_lookups import judge_lookups
from millpy.admin.doctor_results import judge_refused_results
from millpy.admin.doctor_retention import judge_references
from millpy.admin.doctor_sinks import judge_sinks
from millpy.admin.doctor_sites import judge_sites
from millpy.admin.doctor_slots import judge_slots
from millpy.admin.doctor_units import judge_units
from millpy.admin.doctor_windows import judge_windows
from millpy.config.durations import format_duration
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity

OLDEST_VERSION, NEWEST_VERSION = 15, 18
CLOCK_DIFFERENCE_S_MAX = 1.0
SNAPSHOT_S_MAX = 600.0
WAL_BYTES_MIN = 1_000_000_000
CHECKPOINT_S_MIN = 120.0
DISK_FREE_MIN = 0.1
DEAD_LETTERS_MANY = 1_000
AUDIT_BEHIND_S_MAX = 7_200.0
JOIN_APART_S_MAX = 600.0
NEEDED_BECAUSE = {
    "segments": "not read by",
    "deltas": "not folded for",
    "dedupe_runs": "with dedupe ids within the horizon, or records that may still be joined, of",
}


Found = Iterator[Finding]


def examine(facts: Facts, limits: Limits) -> list[Finding]:
    """Return all findings, in the order of the checks."""
    checks: tuple[Callable[[Facts, Limits], Found], ...] = (
        _version, _durability, _settings, _connections, _write_ahead_log, _disk, _pooler, _encryption, _clock,
        _snapshots, _tables, _rights, _roles, _result_tables, _workers, _unfolded, _rings, _dead_letters,
        _standstills, judge_disorder, judge_sites, judge_units, _balance, _archives, _audits, _joins, judge_lookups,
        judge_windows, judge_connections, judge_sinks, judge_injections, judge_slots, judge_references,
        judge_refused_results,
    )  # fmt: skip
    return [finding for check in checks for finding in check(facts, limits)]


def _ok(check: str, found: str) -> Finding:
    return Finding(Severity.OK, check, found)


def _version(facts: Facts, _: Limits) -> Found:
    major = facts.server["version"] // 10_000
    found = f"PostgreSQL {major}.{facts.server['version'] % 10_000}"
    if major < OLDEST_VERSION:
        yield Finding(
            Severity.ERROR,
            "server",
            found,
            "millpy needs version 15 or newer",
            "upgrade the server, or use another one",
        )
    elif major > NEWEST_VERSION:
        yield Finding(
            Severity.NOTE, "server", found, "millpy is tested with 15 to 18", "run the store's tests against it first"
        )
    else:
        yield _ok("server", found)
    if facts.server["in_recovery"]:
        yield Finding(
            Severity.ERROR, "server", "a standby", "workers cannot write to it", "give the URL of the primary"
        )


def _durability(facts: Facts, _: Limits) -> Found:
    server = facts.server
    for name in ("fsync", "full_page_writes"):
        if server[name] == "off":
            yield Finding(
                Severity.ERROR,
                name,
                "off",
                "a crash of the machine can lose or corrupt what millpy has acknowledged",
                f"set {name} = on",
            )
    if server["fsync"] == server["full_page_writes"] == "on":
        yield _ok("durability", "fsync and full_page_writes are on")
    if server["synchronous_commit"] != "on":
        yield Finding(
            Severity.NOTE,
            "synchronous_commit",
            server["synchronous_commit"],
            "millpy sets it to on for its own commits; other programs may lose their last commits",
            "nothing, for millpy",
        )
    if not server["synchronous_standby_names"]:
        yield Finding(
            Severity.NOTE,
            "replication",
            "no synchronous standby",
            "a failover to an asynchronous standby loses the last commits, even of records that the broker has deleted",
            "set synchronous_standby_names if a failover must lose nothing",
        )


def _settings(facts: Facts, _: Limits) -> Found:
    """Report defaults that millpy overrides and operators' own sessions follow."""
    replica = facts.settings.get("session_replication_role")
    if replica is not None:
        yield Finding(
            Severity.WARNING,
            "settings",
            f"session_replication_role is {replica} for this role or database",
            "unless this role may reset it, triggers do not fire, and dropping a graph leaves rows behind",
            "ALTER ROLE or DATABASE … RESET session_replication_role",
        )
    others = {name: value for name, value in facts.settings.items() if name != "session_replication_role"}
    if others:
        yield Finding(
            Severity.NOTE,
            "settings",
            ", ".join(f"{name} = {value}" for name, value in others.items()),
            "millpy overrides these defaults of the database or role on its connections; your own sessions follow them",
            "nothing, for millpy",
        )


def _connections(facts: Facts, _: Limits) -> Found:
    server = facts.server
    free = server["max_connections"] - server["reserved_connections"] - server["connections"]
    live = sum(1 for row in facts.workers if row["live"])
    found = f"{server['connections']} of {server['max_connections']} in use, {live} workers"
    if free < 2 * CONNECTIONS_PER_WORKER:
        yield Finding(
            Severity.WARNING if free >= CONNECTIONS_PER_WORKER else Severity.ERROR,
            "connections",
            found,
            f"a worker needs {CONNECTIONS_PER_WORKER}; one that takes over needs them before the old ones are closed",
            "raise max_connections, or end idle sessions",
        )
    else:
        yield _ok("connections", f"{found}; a worker needs {CONNECTIONS_PER_WORKER}")


def _write_ahead_log(facts: Facts, _: Limits) -> Found:
    size = facts.server["wal_bytes_max"]
    if size < WAL_BYTES_MIN:
        yield Finding(
            Severity.NOTE,
            "max_wal_size",
            _megabytes(size),
            "a busy graph causes a checkpoint every few seconds, after each of which whole pages are written again",
            "set max_wal_size to 2GB or more",
        )
    else:
        yield _ok("max_wal_size", _megabytes(size))
    if facts.server["checkpoint_s"] < CHECKPOINT_S_MIN:
        yield Finding(
            Severity.NOTE,
            "checkpoint_timeout",
            format_duration(facts.server["checkpoint_s"]),
            "after each checkpoint every page is written whole once more, so commits write several times as much",
            "set checkpoint_timeout to 5min or more",
        )
    if facts.server["autovacuum"] == "off":
        yield Finding(Severity.ERROR, "autovacuum", "off", "tables grow without bound", "set autovacuum = on")


def _disk(facts: Facts, _: Limits) -> Found:
    directory = facts.server["data_directory"]
    if directory is None or facts.server["address"] is not None or not Path(directory).is_dir():
        yield Finding(
            Severity.NOTE,
            "disk",
            f"not visible from here; the database takes {_megabytes(facts.server['database_bytes'])}",
            "when it is full, commits fail and sources wait; nothing is lost",
            "watch it on the server",
        )
        return
    usage = shutil.disk_usage(directory)
    found = f"{_megabytes(usage.free)} free of {_megabytes(usage.total)}"
    if usage.free < DISK_FREE_MIN * usage.total:
        yield Finding(
            Severity.WARNING,
            "disk",
            found,
            "when it is full, commits fail and sources wait; nothing is lost",
            "make room on the server's disk",
        )
    else:
        yield _ok("disk", found)


def _pooler(facts: Facts, _: Limits) -> Found:
    if facts.client_pid == facts.server["backend_pid"]:
        yield _ok("pooler", "none: connected to the server directly")
    elif facts.pools_transactions:
        yield Finding(
            Severity.ERROR,
            "pooler",
            "a pool in transaction mode: this connection moved to another process of the server",
            "a worker's settings and LISTEN would reach other clients: workers refuse to start, reading works",
            "connect workers to the server directly, or to a pool in session mode",
        )
    elif facts.pool_spares < CONNECTIONS_PER_WORKER:
        yield Finding(
            Severity.WARNING,
            "pooler",
            f"a pool in session mode that gave only {facts.pool_spares + 1} connections",
            f"a worker needs {CONNECTIONS_PER_WORKER}, and waits while other clients hold them",
            f"raise its size (pgbouncer: default_pool_size) to at least {CONNECTIONS_PER_WORKER} per worker",
        )
    else:
        yield Finding(
            Severity.NOTE,
            "pooler",
            "a program between here and the server keeps its own connections; no sign of transaction mode",
            f"a worker holds its {CONNECTIONS_PER_WORKER} connections all the time, so a pool saves nothing",
            "connect workers to the server directly, if possible",
        )


def _encryption(facts: Facts, _: Limits) -> Found:
    if facts.server["address"] is None or facts.server["encrypted"]:
        yield _ok("encryption", "TLS" if facts.server["encrypted"] else "a local socket")
    elif facts.server["address"].partition("/")[0] in ("127.0.0.1", "::1"):
        yield _ok("encryption", "none, but the connection stays on one machine")
    else:
        yield Finding(
            Severity.WARNING,
            "encryption",
            "the connection is not encrypted",
            "records and, with some settings, the password can be read in transit",
            "add sslmode=verify-full to the URL, unless the network is private",
        )


def _clock(facts: Facts, _: Limits) -> Found:
    difference = facts.clock_difference_s
    found = f"the server's clock is {abs(difference):.2f} s {'ahead' if difference >= 0 else 'behind'}"
    if abs(difference) > CLOCK_DIFFERENCE_S_MAX + facts.round_trip_s:
        yield Finding(
            Severity.WARNING,
            "clock",
            found,
            "leases and times of arrival follow the server's clock; one of the two clocks is wrong",
            "synchronize both by NTP",
        )
    else:
        yield _ok("clock", found)
    for row in facts.clocks:
        refused = row["kind"] == "clock_refused"
        what = "ignores a step of the server's clock" if refused else "cannot tell which clock is right"
        yield Finding(
            Severity.WARNING,
            "worker's clock",
            f"worker {row['worker'][:8]} of {row['graph']} on {row['host']} {what}: "
            f"{row['ahead_s']:+.0f} s, {format_duration(row['since_s'])} ago",
            "its time runs without the step until the clocks agree"
            if refused
            else "until they agree, idle sources advance by the earlier one",
            "synchronize the server and that machine by NTP",
        )


def _snapshots(facts: Facts, _: Limits) -> Found:
    held = [row for row in facts.old_snapshots if row["age_s"] > SNAPSHOT_S_MAX]
    for row in held:
        who = ", ".join(filter(None, (row["role"], row["application"], row["state"])))
        yield Finding(
            Severity.WARNING,
            "old snapshot",
            f"{row['kind']} {row['name']} ({who}) for {format_duration(row['age_s'])}",
            "while it lasts, old row versions cannot be removed: commits get slower, and slots may stay full",
            f"end it: SELECT pg_terminate_backend({row['name']})"
            if row["kind"] == "session"
            else "COMMIT PREPARED or ROLLBACK PREPARED it",
        )
    if not held:
        yield _ok("old snapshots", "not found")


def _tables(facts: Facts, _: Limits) -> Found:
    if not facts.server["migrated"]:
        yield Finding(
            Severity.ERROR, "tables", "millpy's tables are missing", "graphs cannot run", "run `millpy migrate`"
        )
    elif facts.unfit is not None:
        yield Finding(
            Severity.ERROR,
            "tables",
            facts.unfit.message,
            "workers of this version refuse to start",
            facts.unfit.hint,
        )
    elif facts.revision is not None:
        yield _ok("tables", f"at revision {facts.revision}")


def _rights(facts: Facts, _: Limits) -> Found:
    server, rights = facts.server, facts.rights
    if server["is_superuser"] == "on":
        yield Finding(
            Severity.NOTE,
            "role",
            f"{server['role']} is a superuser",
            "workers need far fewer rights",
            "run workers under a separate role",
        )
    if not rights:
        return
    missing = [
        what
        for what, has in (
            ("USAGE on schema mill", rights["may_use_mill"]),
            ("USAGE on schema millpy", rights["may_read_views"]),
            ("UPDATE on mill.intervals", rights["may_commit"]),
            ("INSERT on mill.deltas", rights["may_append"]),
        )
        if not has
    ]
    if missing:
        yield Finding(
            Severity.WARNING,
            "rights",
            f"{server['role']} lacks {', '.join(missing)}",
            "a worker under this role cannot run",
            "GRANT them, or give the URL of the worker's role",
        )
    else:
        deploys = "deploy and " if rights["is_owner"] and rights["may_create_schemas"] else ""
        yield _ok("rights", f"{server['role']} may {deploys}run workers")


def _roles(facts: Facts, _: Limits) -> Found:
    """Check that the workers' role has no more rights than it needs."""
    for row in facts.logins:
        if row["superuser"] or row["owns"]:
            yield Finding(
                Severity.NOTE,
                "roles",
                f"workers run as {row['login']}, {'a superuser' if row['superuser'] else 'the owner of the tables'}",
                "a mistake in a graph's code could change or drop any table",
                f"run them as {facts.roles.worker}" if facts.roles else "run `millpy migrate --roles`",
            )
    if facts.roles is not None:
        yield _ok("roles", f"owner {facts.roles.owner}, worker {facts.roles.worker}, reader {facts.roles.reader}")


def _result_tables(facts: Facts, _: Limits) -> Found:
    for row in facts.result_tables:
        name = f"{row['graph']}.{row['table']}"
        if not row["found"]:
            yield Finding(
                Severity.ERROR,
                "result table",
                f"{name} is gone",
                "the graph's commits fail",
                "restore it, or deploy the graph as a new generation",
            )
        elif row["granted"] is False:
            yield Finding(
                Severity.ERROR,
                "result table",
                f"the worker's role may not read and write {name}",
                "the graph's commits fail",
                "run `millpy migrate --roles`",
            )
        elif row["let_in"] is False:
            yield Finding(
                Severity.ERROR,
                "result table",
                f"row-level security of {name} has no policy for workers",
                "the graph's commits fail",
                "CREATE POLICY millpy_worker ON it TO the worker's role USING (true) WITH CHECK (true)",
            )
    for row in facts.triggers:
        yield Finding(
            Severity.WARNING,
            "trigger",
            f"{row['function']} on {row['table']} names {row['name']} without its schema",
            "workers have no schema on their search_path: the function fails, and its rows become dead letters",
            f"write the schema, or ALTER FUNCTION {row['function']}() SET search_path = …",
        )


def _workers(facts: Facts, _: Limits) -> Found:
    for row in facts.workers:
        if not row["live"]:
            left_s = row["lease_left_s"]  # above 0 if the server's clock was set back: nobody knows how long ago
            ended = f"{format_duration(-left_s)} ago" if left_s < 0 else "before the server's clock was set back"
            yield Finding(
                Severity.WARNING if row["intervals"] else Severity.NOTE,
                "expired lease",
                f"worker {row['worker'][:8]} of {row['graph']} (pid {row['pid']} on {row['host']}), "
                f"{ended}, {row['intervals']} intervals",
                "it was killed or is frozen; another worker, if any, takes its intervals over",
                "start a worker of that graph" if row["intervals"] else "nothing",
            )
    for graph in facts.graphs:
        if graph["finished"]:
            yield _ok("graph", f"{graph['graph']} has finished")
        elif graph["ownerless"]:
            yield Finding(
                Severity.WARNING,
                "graph",
                f"{graph['graph']}: {graph['ownerless']} of {graph['intervals']} intervals have no owner",
                "their records wait, and so do the watermarks that depend on them",
                f"start a worker: millpy run, with the file of {graph['graph']}"
                if not graph["beside"]
                else f"start a worker with the file of generation {graph['generation']}; or, if it is no longer needed:"
                f" millpy drop {graph['graph']}",
            )
        else:
            yield _ok("graph", f"{graph['graph']}: all {graph['intervals']} intervals have an owner")


def _unfolded(facts: Facts, limits: Limits) -> Found:
    for graph in facts.graphs:
        size = graph["unfolded_bytes"]
        if size > limits.unfolded_bytes_max // 2:
            yield Finding(
                Severity.WARNING,
                "unfolded state",
                f"{graph['graph']}: {_megabytes(size)}",
                f"at {_megabytes(limits.unfolded_bytes_max)} a worker stops reading until it has folded",
                "look for old snapshots and a slow disk above; start another worker",
            )
        else:
            yield _ok("unfolded state", f"{graph['graph']}: {_megabytes(size)}")


def _rings(facts: Facts, _: Limits) -> Found:
    for ring in facts.rings:
        found = f"{ring['ring']}: {ring['taken']} of {ring['slots']} slots, {_megabytes(ring['bytes'])}"
        if ring["partitions"] < ring["slots"]:
            yield Finding(
                Severity.ERROR, "ring", f"{found}; partitions are missing", "workers will fail", "restore the tables"
            )
        needed_by = facts.needed_by.get(ring["ring"], [])
        if ring["oldest_needed"] is not None:
            age = format_duration(ring["oldest_needed_s"])
            why = NEEDED_BECAUSE[ring["ring"]]
            found += f"; the oldest needed is {age} old, {why} {', '.join(needed_by) or 'unknown computations'}"
        if ring["taken"] >= ring["slots"] - 2:
            yield Finding(
                Severity.WARNING,
                "ring",
                found,
                "with all slots taken, the current one grows, and so does the database",
                "start workers for these computations, so that they read or fold it",
            )
        else:
            yield _ok("ring", found)


def _dead_letters(facts: Facts, _: Limits) -> Found:
    for row in facts.dead_letters:
        many = row["count"] >= DEAD_LETTERS_MANY
        view = "dead_letters" if row["kind"] == "dead letter" else "late_records"
        unstored = f", and {row['not_kept']:,} more are counted, but not stored" if row["not_kept"] else ""
        yield Finding(
            Severity.WARNING if many else Severity.NOTE,
            f"{row['kind']}s",
            f"{row['graph']}.{row['stream']}: {row['count']} in the last hour{unstored}",
            "they are not in the results",
            f"read the view millpy.{view}",
        )


def _standstills(facts: Facts, _: Limits) -> Found:
    for row in facts.standstills:
        where = f"{row['graph']}.{row['name']}"
        if row["kind"] == "source":
            yield Finding(
                Severity.WARNING,
                "paused source",
                f"{where}, {row['count']} of its partitions: {row['reason']}",
                "it is not read, and its watermark does not advance",
                f"fix the cause, then run `millpy sources resume {row['name']} {row['graph']}`",
            )
        elif row["kind"] == "engine":
            yield Finding(
                Severity.WARNING,
                "Spark's driver",
                f"{row['graph']} is computed by Spark, and no driver is alive",
                "nothing is computed, and its workers wait",
                "start the same `millpy backfill` or stream again; or end it with `millpy drop`",
            )
        else:
            yield Finding(
                Severity.WARNING,
                "parked keys",
                f"{where}, {row['count']} of its keys: {row['reason']}",
                "new records for them wait, and so do watermarks",
                "list them with `millpy parked list`, fix the cause, then release or discard them",
            )


def _balance(facts: Facts, _: Limits) -> Found:
    for row in facts.unbalanced:
        yield Finding(
            Severity.ERROR,
            "accounting",
            f"{row['graph']}.{row['stream']} ({row['part']}) does not add up",
            "records were lost or counted twice, which must not happen",
            "keep the database unchanged, and report this with the rows of the view millpy.accounting",
        )
    if facts.revision is not None and not facts.unbalanced:
        yield _ok("accounting", "adds up")


def _archives(facts: Facts, limits: Limits) -> Found:
    for row in facts.archives:
        name, waits = f"{row['graph']}.{row['archive']}", row["pending"] and (row["why"] or not row["live"])
        if not waits:
            yield _ok("archive", f"{name}: {row['pending']} records wait")
            continue
        why = f"its place cannot be written: {row['why']}" if row["why"] and row["live"] else "nothing archives them"
        yield Finding(
            Severity.WARNING,
            "archive",
            f"{name}: {row['pending']} records wait ({_megabytes(row['pending_bytes'])}); {why}",
            f"they stay in the database; above {_megabytes(limits.backlog_bytes_high)} of backlog, "
            "sources wait or records are skipped",
            "make room, or restore the directory and its rights; the archive then continues"
            if row["live"]
            else f"run `millpy archive` with the file of {row['graph']}, or workers with `millpy run --archive`",
        )


def _audits(facts: Facts, _: Limits) -> Found:
    for row in facts.audits:
        name = f"{row['graph']}.{row['result_table']}"
        if row["differences"]:
            yield Finding(
                Severity.ERROR,
                "audit",
                f"{name}: {row['differences']} rows in {row['hours_that_differ']} hours differ from their history, "
                f"the first at {row['first_hour']}",
                "rows were lost, added or changed, or the workers run other code than the audit",
                "read the examples in the view millpy.audits; after a repair, run `millpy audit` over the hours again",
            )
        if row["behind_s"] is not None and row["behind_s"] > AUDIT_BEHIND_S_MAX:
            yield Finding(
                Severity.WARNING,
                "audits behind",
                f"{name}: by {format_duration(row['behind_s'])}",
                "hours that are final are not audited",
                "start services.auditor, or read in its log why its audits fail",
            )
    if facts.audits and not any(row["differences"] for row in facts.audits):
        yield _ok("audits", f"{sum(row['hours'] for row in facts.audits)} hours of tables equal their history")


def _joins(facts: Facts, _: Limits) -> Found:
    for row in facts.joins:
        found = f"{row['graph']}.{row['computation']} keeps {_megabytes(row['bytes'])} of records that may still match"
        if row["apart_s"] is None or row["apart_s"] <= JOIN_APART_S_MAX:
            yield _ok("join", found)
            continue
        yield Finding(
            Severity.WARNING,
            "join",
            f"{found}; {row['slowest']} is {format_duration(row['apart_s'])} behind the other side",
            "the records of the faster side stay in memory until the slower one has passed them",
            f"run `millpy watermarks --explain {row['graph']}.{row['slowest']}`",
        )


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

"""Judges what was found in a database: each finding says what it means and what to do. Pure; reads nothing itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from millpy.limits import Limits
from millpy.store.postgres.diagnosis import CONNECTIONS_PER_WORKER, Facts
from millpy.store.revision import HEAD

OLDEST_VERSION, NEWEST_VERSION = 15, 18
CLOCK_DIFFERENCE_S_MAX = 1.0
SNAPSHOT_S_MAX = 600.0
WAL_BYTES_MIN = 1_000_000_000
CHECKPOINT_S_MIN = 120.0
DISK_FREE_MIN = 0.1
SET_ASIDE_MANY = 1_000
NEEDED_BECAUSE = {
    "segments": "not read by",
    "deltas": "not folded for",
    "dedupe_runs": "with ids that may come again of",
}


class Severity(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what was looked at, in two or three words.
        found: what is there.
        meaning: why it matters; empty when all is well.
        action: what to do; empty when all is well.
    """

    severity: Severity
    check: str
    found: str
    meaning: str = ""
    action: str = ""


Found = Iterator[Finding]


def examine(facts: Facts, limits: Limits) -> list[Finding]:
    """All findings, in the order of the checks."""
    checks: tuple[Callable[[Facts, Limits], Found], ...] = (
        _version, _durability, _settings, _connections, _write_ahead_log, _disk, _pooler, _encryption, _clock,
        _snapshots, _tables, _rights, _roles, _result_tables, _workers, _unfolded, _rings, _set_aside,
        _standstills, _balance,
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
            Severity.NOTE, "server", found, "millpy was tested with 15 to 18", "run the store's tests against it first"
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
                "a crash of the machine can lose or tear what millpy has acknowledged",
                f"set {name} = on",
            )
    if server["fsync"] == server["full_page_writes"] == "on":
        yield _ok("durability", "fsync and full_page_writes are on")
    if server["synchronous_commit"] != "on":
        yield Finding(
            Severity.NOTE,
            "synchronous_commit",
            server["synchronous_commit"],
            "millpy sets it to on for its own commits; other programs may lose what they committed last",
            "nothing, for millpy",
        )
    if not server["synchronous_standby_names"]:
        yield Finding(
            Severity.NOTE,
            "replication",
            "no synchronous standby",
            "a failover to an asynchronous standby loses the last commits, also those that a broker has forgotten",
            "set synchronous_standby_names when a failover must lose nothing",
        )


def _settings(facts: Facts, _: Limits) -> Found:
    """Defaults that millpy does not follow; people's own sessions do."""
    replica = facts.settings.get("session_replication_role")
    if replica is not None:
        yield Finding(
            Severity.WARNING,
            "settings",
            f"session_replication_role is {replica} for this role or database",
            "unless this role may set it back, no trigger fires: dropping a graph leaves rows behind",
            "ALTER ROLE or DATABASE … RESET session_replication_role",
        )
    others = {name: value for name, value in facts.settings.items() if name != "session_replication_role"}
    if others:
        yield Finding(
            Severity.NOTE,
            "settings",
            ", ".join(f"{name} = {value}" for name, value in others.items()),
            "defaults of this database or role; millpy sets its own on every connection, your sessions follow them",
            "nothing, for millpy",
        )


def _connections(facts: Facts, _: Limits) -> Found:
    server = facts.server
    free = server["max_connections"] - server["reserved_connections"] - server["connections"]
    live = sum(1 for row in facts.workers if row["lease_left_s"] >= 0)
    found = f"{server['connections']} of {server['max_connections']} in use, {live} workers"
    if free < 2 * CONNECTIONS_PER_WORKER:
        yield Finding(
            Severity.WARNING if free >= CONNECTIONS_PER_WORKER else Severity.ERROR,
            "connections",
            found,
            f"a worker needs {CONNECTIONS_PER_WORKER}; one that takes over needs as many before the other's are gone",
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
            "a busy graph makes a checkpoint every few seconds, and each writes whole pages again",
            "set max_wal_size to 2GB or more",
        )
    else:
        yield _ok("max_wal_size", _megabytes(size))
    if facts.server["checkpoint_s"] < CHECKPOINT_S_MIN:
        yield Finding(
            Severity.NOTE,
            "checkpoint_timeout",
            _duration(facts.server["checkpoint_s"]),
            "after each checkpoint every page is written whole once more: commits write several times as much",
            "set checkpoint_timeout to 5min or more",
        )
    if facts.server["autovacuum"] == "off":
        yield Finding(Severity.ERROR, "autovacuum", "off", "tables grow without end", "set autovacuum = on")


def _disk(facts: Facts, _: Limits) -> Found:
    directory = facts.server["data_directory"]
    if directory is None or facts.server["address"] is not None or not Path(directory).is_dir():
        yield Finding(
            Severity.NOTE,
            "disk",
            f"cannot be seen from here; the database holds {_megabytes(facts.server['database_bytes'])}",
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
        yield _ok("pooler", "none: connected to the server itself")
    elif facts.pools_transactions:
        yield Finding(
            Severity.ERROR,
            "pooler",
            "a pool in transaction mode: this connection went on in another process of the server",
            "settings and LISTEN of a worker would end up with others: workers refuse to start, reading goes",
            "connect workers to the server itself, or to a pool in session mode",
        )
    elif facts.pool_spares < CONNECTIONS_PER_WORKER:
        yield Finding(
            Severity.WARNING,
            "pooler",
            f"a pool in session mode that gave us {facts.pool_spares + 1} connections and no more",
            f"a worker waits for the {CONNECTIONS_PER_WORKER} that it needs, as long as others hold them",
            f"raise its size (pgbouncer: default_pool_size) to {CONNECTIONS_PER_WORKER} a worker and more",
        )
    else:
        yield Finding(
            Severity.NOTE,
            "pooler",
            "something between here and the server keeps its own connections; no sign of transaction mode",
            f"a worker needs {CONNECTIONS_PER_WORKER} connections to itself all the time, so a pool gains it nothing",
            "connect workers to the server itself where that is possible",
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
            "records and, with some settings, the password can be read on the way",
            "add sslmode=verify-full to the URL; nothing, where nobody else is on that network",
        )


def _clock(facts: Facts, _: Limits) -> Found:
    difference = facts.clock_difference_s
    found = f"the server's clock is {abs(difference):.2f} s {'ahead' if difference >= 0 else 'behind'}"
    if abs(difference) > CLOCK_DIFFERENCE_S_MAX + facts.round_trip_s:
        yield Finding(
            Severity.WARNING,
            "clock",
            found,
            "leases and the time of arrival follow the server's clock; one of the two is wrong",
            "let both follow NTP",
        )
    else:
        yield _ok("clock", found)
    for row in facts.clocks:
        refused = row["kind"] == "clock_refused"
        what = "does not follow a step of the server's clock" if refused else "does not know whose clock is right"
        yield Finding(
            Severity.WARNING,
            "worker's clock",
            f"worker {row['worker'][:8]} of {row['graph']} on {row['host']} {what}: "
            f"{row['ahead_s']:+.0f} s, {_duration(row['since_s'])} ago",
            "its time goes on without the step until the clocks agree"
            if refused
            else "until they agree, idle sources advance by the earlier one",
            "let the server and that machine follow NTP",
        )


def _snapshots(facts: Facts, _: Limits) -> Found:
    held = [row for row in facts.old_snapshots if row["age_s"] is None or row["age_s"] > SNAPSHOT_S_MAX]
    for row in held:
        who = ", ".join(filter(None, (row["role"], row["application"], row["state"])))
        age = "" if row["age_s"] is None else f" for {_duration(row['age_s'])}"
        yield Finding(
            Severity.WARNING,
            "old snapshot",
            f"{row['kind']} {row['name']} ({who}){age}",
            "old row versions cannot be cleaned up while it lasts: commits get slower, and slots may stay full",
            {
                "session": f"end it: SELECT pg_terminate_backend({row['name']})",
                "prepared transaction": "COMMIT PREPARED or ROLLBACK PREPARED it",
            }.get(row["kind"], "drop the slot if nobody comes back to it"),
        )
    if not held:
        yield _ok("old snapshots", "nobody holds one")


def _tables(facts: Facts, _: Limits) -> Found:
    if facts.server["migrated"] is None:
        yield Finding(
            Severity.ERROR, "tables", "this database has none of millpy", "no graph can run", "run `millpy migrate`"
        )
    elif facts.revision is not None and facts.revision != HEAD:
        yield Finding(
            Severity.ERROR,
            "tables",
            f"at revision {facts.revision}, this millpy needs {HEAD}",
            "workers of this version refuse to start",
            "run `millpy migrate`" if facts.revision < HEAD else "install the newer millpy here too",
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
            "workers need far less",
            "run workers under a role of their own",
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
    """Whether who runs workers has no more rights than that takes."""
    for row in facts.logins:
        if row["superuser"] or row["owns"]:
            yield Finding(
                Severity.NOTE,
                "roles",
                f"workers run as {row['login']}, {'a superuser' if row['superuser'] else 'who owns the tables'}",
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
        if row["lease_left_s"] < 0:
            yield Finding(
                Severity.WARNING if row["intervals"] else Severity.NOTE,
                "expired lease",
                f"worker {row['worker'][:8]} of {row['graph']} (pid {row['pid']} on {row['host']}), "
                f"{_duration(-row['lease_left_s'])} ago, {row['intervals']} intervals",
                "it was killed or is frozen; another worker takes its intervals over, when there is one",
                "start a worker of that graph" if row["intervals"] else "nothing",
            )
    for graph in facts.graphs:
        if graph["finished"]:
            yield _ok("graph", f"{graph['graph']} has finished")
        elif graph["ownerless"]:
            yield Finding(
                Severity.WARNING,
                "graph",
                f"{graph['graph']}: nobody works on {graph['ownerless']} of {graph['intervals']} intervals",
                "their records wait, and watermarks behind them stand still",
                f"start a worker: millpy run, with the file of {graph['graph']}"
                if not graph["beside"]
                else f"start a worker with the file of generation {graph['generation']}; or, when nobody needs that any"
                f" more: millpy drop {graph['graph']}",
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
            age = _duration(ring["oldest_needed_s"])
            why = NEEDED_BECAUSE[ring["ring"]]
            found += f"; the oldest needed is {age} old, {why} {', '.join(needed_by) or 'nobody now'}"
        if ring["taken"] >= ring["slots"] - 2:
            yield Finding(
                Severity.WARNING,
                "ring",
                found,
                "with all slots taken the current one grows, and the database with it",
                "start workers for the computations named, so that they read or fold it",
            )
        else:
            yield _ok("ring", found)


def _set_aside(facts: Facts, _: Limits) -> Found:
    for row in facts.set_aside:
        many = row["count"] >= SET_ASIDE_MANY
        view = "dead_letters" if row["kind"] == "dead letter" else "late_records"
        yield Finding(
            Severity.WARNING if many else Severity.NOTE,
            f"{row['kind']}s",
            f"{row['graph']}.{row['stream']}: {row['count']} in the last hour",
            "they are not in the results",
            f"look into the view millpy.{view}",
        )


def _standstills(facts: Facts, _: Limits) -> Found:
    for row in facts.standstills:
        where = f"{row['graph']}.{row['name']}"
        if row["kind"] == "source":
            yield Finding(
                Severity.WARNING,
                "paused source",
                f"{where}, {row['count']} of its partitions: {row['reason']}",
                "nothing is read from it, and its watermark stands still",
                f"mend the cause, then `millpy sources resume {row['name']} {row['graph']}`",
            )
        else:
            yield Finding(
                Severity.WARNING,
                "parked keys",
                f"{where}, {row['count']} of its keys: {row['reason']}",
                "what comes for them waits, and so do watermarks",
                "look at them with `millpy parked list`, mend the cause, then release or discard them",
            )


def _balance(facts: Facts, _: Limits) -> Found:
    for row in facts.unbalanced:
        yield Finding(
            Severity.ERROR,
            "accounting",
            f"{row['graph']}.{row['stream']} ({row['part']}) does not add up",
            "records were lost or counted twice: this must not happen",
            "keep the database as it is, and report it with what the view millpy.accounting shows",
        )
    if facts.revision is not None and not facts.unbalanced:
        yield _ok("accounting", "adds up")


def _megabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"

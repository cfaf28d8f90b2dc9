"""Read the facts for `millpy doctor` over one connection. This module judges nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from psycopg.rows import dict_row

from millpy.clock import Clock
from millpy.errors import ConfigError
from millpy.store.postgres.deployment.roles import Roles, read_roles
from millpy.store.postgres.errors import connect_error, translate
from millpy.store.postgres.pooler_check import count_connections, pooler_shares
from millpy.store.postgres.session import pin_transaction, plain_transactions
from millpy.store.postgres.session_settings import ENCODING
from millpy.store.postgres.statements import statement
from millpy.store.postgres.timeouts import BoundedConnection
from millpy.store.revision import check_revision

SITE_SILENT_S = 3_600.0
"""A site without records for this long, while others have some, is reported."""
CONNECTIONS_PER_WORKER = 7
"""Commit, poll, admin, fold, hint, listen and heartbeat; more for lookup tables and for sinks."""
CONNECT_S_MAX = 10
STATEMENT_S_MAX = 20
ANSWER_S_MAX = 25.0
"""A pool without a spare connection accepts the login and then does not answer."""
NEEDED_BY = {
    "segments": statement("look_who_needs_segments"),
    "deltas": statement("look_who_needs_deltas"),
    "dedupe_runs": statement("look_who_needs_dedupe_runs"),
}
Row = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Facts:
    """The facts about a database.

    Attributes:
        client_pid: the server process announced when the connection was made; a pooler announces another one.
        pools_transactions: whether a pooler gave the connection's server process to another client between statements.
        pool_spares: how many connections a pooler gave us beside this one, at most as many as a worker needs.
        clock_difference_s: the server's clock minus this machine's, at the middle of a round trip.
        round_trip_s: the length of that round trip.
        settings: the defaults of this database and role that millpy overrides on its connections.
        unfit: why the tables are not those of this millpy.
        revision: the revision of millpy's tables; None if they are missing or unfit; the facts below are then empty.
        needed_by: ring -> the computations that need its oldest slot.
    """

    client_pid: int
    pools_transactions: bool = False
    pool_spares: int = 0
    clock_difference_s: float
    round_trip_s: float
    server: Row
    old_snapshots: list[Row]
    settings: dict[str, str] = field(default_factory=dict)
    unfit: ConfigError | None = None
    revision: str | None = None
    rights: Row = field(default_factory=dict)
    roles: Roles | None = None
    logins: list[Row] = field(default_factory=list)
    result_tables: list[Row] = field(default_factory=list)
    triggers: list[Row] = field(default_factory=list)
    workers: list[Row] = field(default_factory=list)
    clocks: list[Row] = field(default_factory=list)
    graphs: list[Row] = field(default_factory=list)
    rings: list[Row] = field(default_factory=list)
    needed_by: dict[str, list[str]] = field(default_factory=dict)
    dead_letters: list[Row] = field(default_factory=list)
    standstills: list[Row] = field(default_factory=list)
    unbalanced: list[Row] = field(default_factory=list)
    archives: list[Row] = field(default_factory=list)
    disorder: list[Row] = field(default_factory=list)
    sites: list[Row] = field(default_factory=list)
    units: list[Row] = field(default_factory=list)
    audits: list[Row] = field(default_factory=list)
    joins: list[Row] = field(default_factory=list)
    lookups: list[Row] = field(default_factory=list)
    sinks: list[Row] = field(default_factory=list)
    injections: list[Row] = field(default_factory=list)
    slots: list[Row] = field(default_factory=list)
    references: list[Row] = field(default_factory=list)
    refused_results: list[Row] = field(default_factory=list)
    window_triggers: list[Row] = field(default_factory=list)
    held_windows: list[Row] = field(default_factory=list)
    open_windows: list[Row] = field(default_factory=list)
    disconnected: list[Row] = field(default_factory=list)


def read_facts(
    url: str, clock: Clock, *, statement_s_max: float = STATEMENT_S_MAX, examine_pooler: bool = True
) -> Facts:
    """Read the facts about a database.

    Args:
        url: the database.
        clock: the clock of this machine.
        statement_s_max: the seconds after which a statement is cancelled.
        examine_pooler: whether to open further connections where a pooler is, to find out how it shares them.

    Raises:
        ConfigError, StoreUnavailableError: the database cannot be reached, or stops answering.
    """
    try:
        try:
            facts = _looked(url, clock, partial(_pinned, statement_s_max))
        except psycopg.errors.ProtocolViolation:
            # A pool in statement mode refuses transactions, so nothing can be set before a statement.
            facts = _looked(url, clock, lambda _: nullcontext())
        if examine_pooler and facts.client_pid != facts.server["backend_pid"]:
            facts.pools_transactions = pooler_shares(url)
            given = 0 if facts.pools_transactions else count_connections(url, CONNECTIONS_PER_WORKER + 1)
            facts.pool_spares = max(0, given - 1)
        return facts
    except (psycopg.OperationalError, psycopg.ProgrammingError) as error:
        if error.sqlstate is None:
            raise connect_error(error) from error
        raise translate(error) from error


def _looked(
    url: str, clock: Clock, settings: Callable[[psycopg.Connection[Row]], AbstractContextManager[None]]
) -> Facts:
    with _connected(url) as connection:
        with settings(connection):
            return _look(connection, clock)


@contextmanager
def _pinned(statement_s_max: float, connection: psycopg.Connection[Row]) -> Iterator[None]:
    """Keep all statements in one transaction: behind a pool, a later statement may run in another server process."""
    with connection.transaction():
        pin_transaction(connection, {"statement_timeout": f"{int(statement_s_max * 1000)}ms"})
        yield


def _connected(url: str) -> BoundedConnection[Row]:
    connection = BoundedConnection.connect(
        url,
        autocommit=True,
        connect_timeout=CONNECT_S_MAX,
        prepare_threshold=None,
        row_factory=dict_row,
        client_encoding=ENCODING,
    )
    plain_transactions(connection, read_only=True)
    connection.answer_s = ANSWER_S_MAX
    return connection


def _look(connection: psycopg.Connection[Row], clock: Clock) -> Facts:
    client_pid = connection.info.backend_pid
    before = clock.monotonic()
    (server,) = _rows(connection, statement("look_at_server"))
    round_trip_s = clock.monotonic() - before
    difference_s = server["server_time"] - (clock.now_us() / 1e6 - round_trip_s / 2)
    facts = Facts(
        client_pid=client_pid,
        clock_difference_s=difference_s,
        round_trip_s=round_trip_s,
        server=server,
        old_snapshots=_rows(connection, statement("look_for_old_snapshots")),
    )
    facts.settings = {row["name"]: row["value"] for row in _rows(connection, statement("look_at_settings"))}
    if not server["migrated"]:
        return facts
    (facts.rights,) = _rows(connection, statement("look_at_rights"))
    if not (facts.rights["may_use_mill"] and facts.rights["may_read_views"]):
        return facts
    (version,) = _rows(connection, statement("read_revision"))
    try:
        check_revision(version["version_num"], version["build"])
    except ConfigError as error:
        facts.unfit = error
        return facts
    facts.revision = version["version_num"]
    facts.roles = read_roles(connection)
    facts.logins = _rows(connection, statement("look_at_logins"))
    facts.result_tables = _rows(connection, statement("look_at_result_tables"))
    facts.triggers = _rows(connection, statement("look_at_triggers"))
    facts.workers = _rows(connection, statement("look_at_workers"))
    facts.clocks = _rows(connection, statement("look_at_clocks"))
    facts.graphs = _rows(connection, statement("look_at_graphs"))
    facts.rings = _rows(connection, statement("look_at_rings"))
    for ring in facts.rings:
        if ring["oldest_needed"] is not None:
            found = _rows(connection, NEEDED_BY[ring["ring"]], slot=ring["oldest_needed"])
            facts.needed_by[ring["ring"]] = [f"{row['graph']}.{row['computation']}" for row in found]
    facts.dead_letters = _rows(connection, statement("look_at_dead_letters"))
    facts.standstills = _rows(connection, statement("look_at_standstills"))
    facts.unbalanced = _rows(connection, statement("look_at_balance"))
    facts.archives = _rows(connection, statement("look_at_archives"))
    facts.disorder = _rows(connection, statement("look_at_disorder"))
    facts.sites = _rows(connection, statement("look_at_sites"), after_s=SITE_SILENT_S)
    facts.units = _rows(connection, statement("look_at_units"))
    facts.audits = _rows(connection, statement("look_at_audits"))
    facts.joins = _rows(connection, statement("look_at_joins"))
    facts.sinks = _rows(connection, statement("look_at_sinks"))
    facts.lookups = _rows(connection, statement("look_at_lookups"))
    facts.injections = _rows(connection, statement("look_at_injections"))
    facts.slots = _rows(connection, statement("look_at_slots"))
    facts.references = _rows(connection, statement("look_at_references"))
    facts.refused_results = _rows(connection, statement("look_at_refused_results"))
    facts.window_triggers = _rows(connection, statement("look_at_window_triggers"))
    facts.held_windows = _rows(connection, statement("look_at_held_windows"))
    facts.open_windows = _rows(connection, statement("look_at_open_windows"))
    facts.disconnected = _rows(connection, statement("look_at_connections"))
    return facts


def _rows(connection: psycopg.Connection[Row], query: bytes, **parameters: Any) -> list[Row]:
    return connection.execute(query, parameters or None).fetchall()

"""Translates PostgreSQL's errors into millpy's, by SQLSTATE.

MW001 stale grant                      StaleSequencerError, names the intervals
MW002 graph version                    GraphVersionError
MW003 slot moved, 23514 no partition   SlotMovedError (transient: the commit retries by itself)
MW004 pane order                       PaneOrderError
MW005 watermark                        WatermarkRegressedError
MW006 cursor                           CursorGapError
23 on our own tables                   CorruptionError; 23503 outside of a commit: TransientError
MW007 request withdrawn                RequestWithdrawnError
MW008 not READ COMMITTED               CorruptionError, because every connection pins READ COMMITTED
MW009 a user's row in the way          PoisonError: it has the key of a window
08, 57P, connection lost               StoreUnavailableError, or CommitUnknownError around COMMIT
40, 55P03, 57014, 25P0x                TransientError
0A000, 26000, 42P05                    TransientError: a prepared statement is gone or stale, and the channel reconnects
53, 58                                 StoreUnavailableError
54000 of NOTIFY                        TransientError: the notification queue is full
22, 23 on a user's table               PoisonError, in a commit
54, XX000 value too large              PoisonError, in a commit; `too_large` unless a result table refuses the value
42, 3D, 28, 3F000                      ConfigError (a missing right or name, a name that is taken, wrong settings)
RAISE of a function that is not ours   ConfigError: an event trigger, or a trigger on our tables, refuses
others                                 CorruptionError

A statement that writes a result table, or is a sink's, and COMMIT run the user's triggers, constraints and functions.
An error of theirs, of any class that is not listed as transient, is a fault of the row (PoisonError). An MW code is
millpy's only if millpy's function raised it. An error about the table itself (the table or a column is gone, a right is
missing, a foreign server is away) is a ResultTableError, after which the worker waits. While a sink's
statement can be planned, what it lacks was named by a value: that is the row's fault (`sink_statements.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import psycopg

from millpy.config.database_url import unreadable_url_error
from millpy.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    CursorGapError,
    GraphVersionError,
    MillError,
    PaneOrderError,
    PoisonError,
    RequestWithdrawnError,
    ResultTableError,
    StaleSequencerError,
    StoreUnavailableError,
    TransientError,
    WatermarkRegressedError,
)
from millpy.store.postgres.unreachable import STANDBY_HINT, is_standby, unreachable_error

OUR_SCHEMA = "mill"
NO_ROOM = "invalid memory alloc request size"
"""The server's message for a value of more than 1 GB. It is an internal message, which is never translated."""
STALE_PLAN = "RevalidateCachedQuery"
"""The server function that finds a prepared statement stale. Names of server functions are never translated."""
MOVES_ROW = "ExecBRInsertTriggers"
"""The server function that refuses a row which a trigger has given a time of another partition."""
OUR_CHECK = "mill.check_panes"
OUR_FUNCTION = re.compile(r"\b(?:mill|millpy)\.\w+\(")
"""A function of ours in a context. It has its schema there, which is on no `search_path` of ours."""
FOREIGN_ROW = "MW009"
SYNTAX_ERROR = "42601"
"""The statement was prepared, so this is the syntax of a value, such as that of a tsquery."""
FOREIGN_KEY = "23503"
"""A row refers to one that is gone. Outside of commits no lock holds it."""
NOT_IN_TRANSACTION = "25001"
"""A function does what only a transaction of its own may, such as to set the isolation level, or VACUUM."""
DAMAGED = ("XX001", "XX002")
"""Damaged data, or a damaged index: not the fault of a row."""


class SlotMovedError(TransientError):
    """A ring has turned since this worker read the current slots: read them and commit again."""


def translate(error: psycopg.Error) -> MillError:
    """Translate an error outside of a commit."""
    state = error.sqlstate or ""
    if state.startswith("MW"):
        return _ours(error, state)
    if connection_lost(error) or state[:2] in ("53", "58"):
        return StoreUnavailableError(
            f"the database is not available: {_line(error)}",
            hint="try again when it is available; nothing of an uncommitted transaction was stored",
        )
    if is_queue_full(error):
        return _queue_full(error)
    if state[:2] in ("40", "25") or state in ("55P03", "57014", "0A000", "26000", "42P05"):
        return TransientError(
            f"temporary database error: {_line(error)}",
            hint=STANDBY_HINT
            if is_standby(error)
            else "nothing was changed: try again; pg_stat_activity shows what blocks it",
        )
    if state == FOREIGN_KEY and error.diag.schema_name == OUR_SCHEMA:
        return TransientError(
            f"a deployment has removed what this is about: {_line(error)}",
            hint="nothing was changed: a worker finds the other version of its graph, and continues with it",
        )
    if state in ("42P10", "55000"):
        return TransientError(
            f"the database refuses to change a table of mill: {_line(error)}: {error.diag.message_detail or ''}",
            hint="nothing was changed, and millpy tries again: drop the row filter of a publication of that table,"
            " or its REPLICA IDENTITY NOTHING",
        )
    if state == "42501":
        return ConfigError(
            f"missing rights: {_line(error)}",
            hint="log in as a member of a role that has them; `millpy migrate --roles` creates such roles",
        )
    if state[:2] in ("3D", "28"):
        return ConfigError(
            f"the database refuses these connection settings: {_line(error)}",
            hint="check the database, the user and the password in the database's URL",
        )
    if state in ("42P07", "42710", "42701"):
        return ConfigError(
            f"another object already has this name: {_line(error)}",
            hint="rename the result table or its column in the graph, or that object",
        )
    if state in ("42P01", "42703", "42883", "3F000"):
        return ConfigError(
            f"a name is missing in the database: {_line(error)}",
            hint="run `millpy migrate`, and check that the result tables exist",
        )
    if state[:2] == "42":
        return ConfigError(
            f"the database rejects a statement: {_line(error)}",
            hint="run `millpy migrate`: the tables may be those of another version of millpy",
        )
    return _unexpected(error, state)


def _unexpected(error: psycopg.Error, state: str) -> MillError:
    if _raised(error) and not OUR_FUNCTION.search((error.diag.context or "").partition("\n")[0]):
        return ConfigError(
            f"a trigger or function of yours refuses a statement: {_line(error)}",
            hint="nothing was changed: the server's log names the function; event triggers see each deployment",
        )
    return CorruptionError(f"unexpected database error ({state}): {_line(error)}")


def is_queue_full(error: psycopg.Error) -> bool:
    """Tell whether a NOTIFY failed because the notification queue is full."""
    return error.sqlstate == "54000" and error.diag.source_function == "PreCommit_Notify"


def _queue_full(error: psycopg.Error) -> TransientError:
    return TransientError(
        f"cannot commit a transaction with NOTIFY: {_line(error)}",
        hint="nothing was changed, and millpy tries again; end the transaction of the listening session that the"
        " server's log names (pg_stat_activity shows its old backend_xmin), and the queue empties",
    )


def connect_error(error: psycopg.Error) -> MillError:
    """Translate the error of an attempt to connect."""
    return unreadable_url_error() if isinstance(error, psycopg.ProgrammingError) else unreachable_error(str(error))


def translate_commit(
    error: psycopg.Error, *, commit_sent: bool, users: bool = False, table: str = "", parent: str = ""
) -> MillError:
    """Translate an error inside a turn's transaction.

    Args:
        error: psycopg's error.
        commit_sent: whether COMMIT may have reached the server.
        users: whether the failed statement runs users' code, because it writes a result table or commits.
        table: the result table that the failed statement writes, if any.
        parent: the result table, if the error names a partition of it.
    """
    state = error.sqlstate or ""
    if parent and state[:2] == "23":
        partition = error.diag.table_name or ""
        return PoisonError(_line(error).replace(partition, parent), table=parent, sqlstate=state)
    if is_queue_full(error):
        return _queue_full(error)
    if users and state and _raised(error):
        return PoisonError(_line(error), table=error.diag.table_name or table, sqlstate=state)
    if connection_lost(error):
        if commit_sent:
            return CommitUnknownError(f"the connection was lost around COMMIT: {_line(error)}")
        if users and _is_of_another_server(error):
            return altered_table_error(table, _line(error))
        return StoreUnavailableError(f"the connection was lost before COMMIT: {_line(error)}")
    if state[:2] == "23":
        return _constraint(error, state)
    if users:
        return _of_users(error, state, table)
    too_large = state[:2] == "54" or (state == "XX000" and _line(error).startswith(NO_ROOM))
    if state[:2] == "22" or too_large:
        return PoisonError(_line(error), table=error.diag.table_name or "", sqlstate=state, too_large=too_large)
    return translate(error)


def _raised(error: psycopg.Error) -> bool:
    """Tell whether a user's function raised the error by RAISE or ASSERT."""
    where = (error.diag.context or "").partition("\n")[0]
    return error.diag.source_function in ("exec_stmt_raise", "exec_stmt_assert") and f" {OUR_CHECK}(" not in where


def _of_users(error: psycopg.Error, state: str, table: str) -> MillError:
    """Translate an error of a statement on a user's table that no function raised on purpose."""
    inside = bool(error.diag.context)
    if state == FOREIGN_ROW:
        return PoisonError(_line(error), table=table, sqlstate=state)
    if state == "0A000" and error.diag.source_function == MOVES_ROW:
        return PoisonError(_line(error), table=table, sqlstate=state)
    if state == "0A000" and not inside and error.diag.source_function != STALE_PLAN:
        return altered_table_error(table, _line(error))  # a rule
    if state == NOT_IN_TRANSACTION and inside:
        return PoisonError(_line(error), table=table, sqlstate=state)
    if state.startswith("MW") or state[:2] in ("40", "25", "53", "58") or state in ("55P03", "57014", "26000", "42P05"):
        return translate(error)
    if state[:2] == "HV" or (not inside and state[:2] in ("42", "3F", "55") and state != SYNTAX_ERROR):
        return altered_table_error(table, _line(error))
    if not state or state in DAMAGED:
        return translate(error)
    return PoisonError(_line(error), table=error.diag.table_name or table, sqlstate=state)


def altered_table_error(table: str, detail: str) -> ResultTableError:
    """Return the error for a result table that differs from its deployment."""
    return ResultTableError(
        f"result table {table!r} is not as it was deployed: {detail}",
        table=table,
        hint="restore the table, or deploy the graph as a new generation; nothing is lost, and workers try again",
    )


def _ours(error: psycopg.Error, state: str) -> MillError:
    detail = error.diag.message_detail or ""
    message = error.diag.message_primary or str(error)
    if state == "MW001":
        return StaleSequencerError(message, stale=[int(part) for part in detail.split(",")])
    if state == "MW002":
        return GraphVersionError(message, hint=f"version {detail} of this graph is deployed; stop this worker")
    known: dict[str, Callable[[str], MillError]] = {
        "MW003": SlotMovedError,
        "MW004": PaneOrderError,
        "MW005": WatermarkRegressedError,
        "MW006": CursorGapError,
        "MW007": RequestWithdrawnError,
    }
    return known.get(state, CorruptionError)(message)


def _constraint(error: psycopg.Error, state: str) -> MillError:
    """Translate a constraint violation.

    In schema mill it is millpy's fault. In a result table it is the row's, because a trigger may have changed the row.
    """
    diag = error.diag
    if diag.schema_name != OUR_SCHEMA:
        return PoisonError(_line(error), table=diag.table_name or "", sqlstate=state)
    if state == "23514" and not diag.constraint_name:
        return SlotMovedError(f"no partition for a row: {_line(error)}")
    return CorruptionError(f"{_line(error)} in {OUR_SCHEMA}.{diag.table_name}")


def connection_lost(error: psycopg.Error) -> bool:
    """Tell whether an error is that of a connection that has ended; what it was sent may have happened."""
    state = error.sqlstate or ""
    if state[:2] == "08" or state[:3] == "57P":
        return True
    return not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def _is_of_another_server(error: psycopg.Error) -> bool:
    """Tell whether a connection that users' code has made was lost: that of ours ends with FATAL, or without a word."""
    return (error.sqlstate or "").startswith("08") and error.diag.severity_nonlocalized == "ERROR"


def _line(error: psycopg.Error) -> str:
    return error.diag.message_primary or " ".join(str(error).split())

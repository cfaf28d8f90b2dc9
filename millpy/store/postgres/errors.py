"""PostgreSQL's errors in millpy's words: the only place that looks at a SQLSTATE.

MW001 stale grant                      StaleSequencerError, names the intervals
MW002 graph version                    GraphVersionError
MW003 slot moved, 23514 no partition   SlotMovedError (transient: the commit tries again by itself)
MW004 pane order                       PaneOrderError
MW005 watermark                        WatermarkRegressedError
MW006 cursor                           CursorGapError
23 on our own tables                   CorruptionError
MW007 a request is gone                RequestWithdrawnError
MW008 not READ COMMITTED               CorruptionError: our connections are
MW009 a row of somebody else's         PoisonError: it has the key of a window
08, 57P, connection lost               StoreUnavailableError, or CommitUnknownError around COMMIT
40, 55P03, 57014, 25P0x                TransientError
0A000, 26000, 42P05                    TransientError: a prepared statement is gone or stale, the lane connects anew
53, 58                                 StoreUnavailableError
54000 of NOTIFY                        TransientError: its queue is full, a hint is left out
22, 23 on a user's own                 PoisonError, in a commit
54, XX000 for want of room             PoisonError, in a commit; `too_large` where it is not a result table's
42, others                             UsageError (missing rights), with a hint

A statement that writes a result table, and COMMIT, run what the user has put there: triggers, constraints, functions of
either. Whatever these raise, of whatever class, is the row's fault (PoisonError), and MW codes mean ours only where our
function raised them. What the server itself says of the table (it is gone, a column is, we may not) is no row's fault:
ResultTableError, which waits.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from millpy.database_url import unreadable
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
from millpy.store.unreachable import unreachable

OUR_SCHEMA = "mill"
NO_ROOM = "invalid memory alloc request size"
"""The server cannot hold a value of more than 1 GB; an internal message, which is not translated."""
STALE_PLAN = "RevalidateCachedQuery"
"""Where the server finds that what it has prepared is of another shape; names of its functions are never translated."""
OUR_CHECK = "mill.check_panes"
FOREIGN_ROW = "MW009"


class SlotMovedError(TransientError):
    """A ring has turned since this worker read the epochs: read them again and commit again."""


def translate(error: psycopg.Error) -> MillError:
    """What an error means outside of a commit."""
    state = error.sqlstate or ""
    if state.startswith("MW"):
        return _ours(error, state)
    if _connection_lost(error, state) or state[:2] in ("53", "58"):
        return StoreUnavailableError(
            f"the database is not available: {_line(error)}",
            hint="try again when it is: what it has not committed is not done",
        )
    if is_queue_full(error):
        return _queue_full(error)
    if state[:2] in ("40", "25") or state in ("55P03", "57014", "0A000", "26000", "42P05"):
        return TransientError(
            f"the database asks to try again: {_line(error)}",
            hint="nothing was changed: try again; pg_stat_activity shows what holds it up",
        )
    if state in ("42P10", "55000"):
        return TransientError(
            f"the database refuses a change to its own tables: {_line(error)}: {error.diag.message_detail or ''}",
            hint="nothing was changed, it is tried again: drop the row filter of a publication of a table of mill,"
            " or the table's REPLICA IDENTITY NOTHING",
        )
    if state == "42501":
        return ConfigError(
            f"missing rights: {_line(error)}",
            hint="log in as a member of a role that may: `millpy migrate --roles` makes them",
        )
    if state[:2] in ("3D", "28") or state == "3F000":
        return ConfigError(f"the database refuses these settings: {_line(error)}")
    if state in ("42P07", "42710"):
        return ConfigError(
            f"something of yours has a name that is needed: {_line(error)}",
            hint="move it away, or rename the result table in the graph",
        )
    if state[:2] == "42":
        return ConfigError(
            f"the database does not know a name: {_line(error)}", hint="was it migrated? is a result table gone?"
        )
    return CorruptionError(f"unexpected answer of the database ({state}): {_line(error)}")


def is_queue_full(error: psycopg.Error) -> bool:
    """Whether the server has no place for another notification: somebody listens in a transaction that does not end."""
    return error.sqlstate == "54000" and error.diag.source_function == "PreCommit_Notify"


def _queue_full(error: psycopg.Error) -> TransientError:
    return TransientError(
        f"a transaction that notifies cannot commit: {_line(error)}",
        hint="nothing was changed, it is tried again; end the transaction that the server's log names, of one that has"
        " said LISTEN (pg_stat_activity, backend_xmin is old), and the queue empties",
    )


def not_connected(error: psycopg.Error) -> MillError:
    """Why there is no connection, in one line."""
    return unreadable() if isinstance(error, psycopg.ProgrammingError) else unreachable(str(error))


def translate_commit(error: psycopg.Error, *, commit_sent: bool, users: bool = False, table: str = "") -> MillError:
    """What an error means inside a turn's transaction.

    Args:
        error: as psycopg raised it.
        commit_sent: whether COMMIT may have reached the server.
        users: whether the statement that failed runs what users have made: it writes a result table, or commits.
        table: the result table, when it is one.
    """
    state = error.sqlstate or ""
    if is_queue_full(error):
        return _queue_full(error)
    if users and state and _raised(error):
        return PoisonError(_line(error), table=error.diag.table_name or table, sqlstate=state)
    if _connection_lost(error, state):
        if commit_sent:
            return CommitUnknownError(f"the connection was lost around COMMIT: {_line(error)}")
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
    """Whether a user's function raised it on purpose, by RAISE or ASSERT; these names are never translated."""
    where = (error.diag.context or "").partition("\n")[0]
    return error.diag.source_function in ("exec_stmt_raise", "exec_stmt_assert") and f" {OUR_CHECK}(" not in where


def _of_users(error: psycopg.Error, state: str, table: str) -> MillError:
    """What a statement on a user's table says that nobody raised on purpose."""
    inside = bool(error.diag.context)
    if state == FOREIGN_ROW:
        return PoisonError(_line(error), table=table, sqlstate=state)
    if state == "0A000" and not inside and error.diag.source_function != STALE_PLAN:
        return altered(table, _line(error))  # a rule
    if state.startswith("MW") or state[:2] in ("40", "25", "53", "58") or state in ("55P03", "57014", "26000", "42P05"):
        return translate(error)
    if not inside and state[:2] in ("42", "3F", "55"):
        return altered(table, _line(error))
    if not inside and state[:2] not in ("22", "38", "39", "44", "54", "P0"):
        return translate(error)
    return PoisonError(_line(error), table=error.diag.table_name or table, sqlstate=state)


def altered(table: str, detail: str) -> ResultTableError:
    """Of a result table that is not as it was deployed."""
    return ResultTableError(
        f"result table {table!r} is not as it was deployed: {detail}",
        hint="restore it, or deploy the graph as a new generation; nothing is lost, its workers try again",
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
    """On a table of schema mill millpy is at fault; on a result table the row is, as a trigger may have changed it."""
    diag = error.diag
    if diag.schema_name != OUR_SCHEMA:
        return PoisonError(_line(error), table=diag.table_name or "", sqlstate=state)
    if state == "23514" and not diag.constraint_name:
        return SlotMovedError(f"no partition for a row: {_line(error)}")
    return CorruptionError(f"{_line(error)} in {OUR_SCHEMA}.{diag.table_name}")


def _connection_lost(error: psycopg.Error, state: str) -> bool:
    if state[:2] == "08" or state[:3] == "57P":
        return True
    return not state and isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)


def _line(error: psycopg.Error) -> str:
    return error.diag.message_primary or " ".join(str(error).split())

"""What a history must have: every row that its table had, in order, and as much of it as was to be kept.

Triggers on the result tables log each change, in the transaction that makes it. So a history is compared with a witness
that shares nothing with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

import psycopg

from tests.crash.checks import Fault

WITNESS = """
CREATE SCHEMA witness;
CREATE TABLE witness.log (
    number bigint GENERATED ALWAYS AS IDENTITY, at timestamptz NOT NULL DEFAULT now(), name text, old jsonb, new jsonb);
CREATE FUNCTION witness.note() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
    INSERT INTO witness.log (name, old, new) VALUES (TG_TABLE_NAME, to_jsonb(OLD), to_jsonb(NEW));
    RETURN NULL;
END $$;
"""
TRIM_EVERY_S = 0.02
OWN = ("emitted_at", "interval_id", "bundle")
"""The columns in which a retraction differs from its pane."""
Row = dict[str, Any]


def add_witness(url: str, schema: str, tables: Sequence[str]) -> None:
    """Log all changes of the tables from now on."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(WITNESS)
        for table in tables:
            connection.execute(
                f"CREATE TRIGGER witness AFTER INSERT OR UPDATE OR DELETE ON {schema}.{table}"
                " FOR EACH ROW EXECUTE FUNCTION witness.note()"  # type: ignore[call-overload]
            )


def history_faults(
    connection: psycopg.Connection, schema: str, table: str, *, retracts: bool, since: datetime | None = None
) -> list[Fault]:
    """Compare a history with its witness, and with its table.

    Args:
        since: the history was trimmed: what no question about a later time needs may be missing.
    """
    windows = _expected(connection, table, retracts=retracts)
    expected = Counter(_text(row) for rows in windows.values() for row in rows)
    stored = Counter(
        _text(row)
        for (row,) in connection.execute(f"SELECT to_jsonb(h) FROM {schema}.{table}_history AS h")  # type: ignore[call-overload]
    )
    needed = (
        expected if since is None else Counter(_text(row) for rows in windows.values() for row in _needed(rows, since))
    )
    found = []
    for kind, rows in (("lost", needed - stored), ("doubled", stored - expected)):
        if rows:
            found.append(
                Fault(kind, f"history of {table}: {rows.total()} rows, such as {next(iter(rows))}", rows.total())
            )  # type: ignore[arg-type]
    if not expected:
        found.append(Fault("violation", f"the history of {table} is empty"))
    rows = f"SELECT * FROM {schema}.{table}"
    believed = f"SELECT * FROM millpy.as_of(NULL::{schema}.{table}, now())"
    for one, other, kind in ((rows, believed, "lost"), (believed, rows, "doubled")):
        if differing := connection.execute(f"{one} EXCEPT {other}").fetchall():  # type: ignore[call-overload]
            found.append(Fault(kind, f"as_of {table}: {len(differing)} rows differ, such as {differing[0]}"))  # type: ignore[arg-type]
    return found


def _expected(connection: psycopg.Connection, table: str, *, retracts: bool) -> dict[Any, list[Row]]:
    """Window -> the rows of its history, in order."""
    found: dict[Any, list[Row]] = {}
    log = "SELECT to_jsonb(at) #>> '{}', old, new FROM witness.log WHERE name = %s ORDER BY number"
    for at, old, new in connection.execute(log, [table]).fetchall():
        row = new or old
        window = found.setdefault((row["device"], row["window_start"], row["window_end"]), [])
        if old is not None and (new is None or retracts):
            window.append({**old, "emitted_at": at, "is_retraction": True})
        if new is not None:
            if window and old is None:  # it had vanished, and comes back
                panes = window[-1]["pane_index"] + 1 - new["pane_index"]
                window[:] = [{**pane, "pane_index": pane["pane_index"] - panes} for pane in window]
            window.append({**new, "is_retraction": False})
    return found


def _needed(rows: Sequence[Row], since: datetime) -> Iterator[Row]:
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        if row["is_retraction"] and datetime.fromisoformat(row["emitted_at"]) < since:
            continue
        if after is None or datetime.fromisoformat(after["emitted_at"]) >= since:
            yield row


def _text(row: Row) -> str:
    return repr(sorted((k, v) for k, v in row.items() if not (row["is_retraction"] and k in ("interval_id", "bundle"))))


@contextmanager
def trimming(url: str, table: str) -> Iterator[list[datetime]]:
    """Trim a history in small pieces, beside all that is written, with every other session killed in the middle.

    Yields a list that has, once the block is left, the time since which the history must be whole.
    """
    stop, since = threading.Event(), []

    def trim() -> None:
        number = 0
        while not stop.wait(TRIM_EVERY_S):
            with suppress(psycopg.OperationalError), psycopg.connect(url, autocommit=True) as connection:
                if not since or not number % 10:
                    since[:] = [connection.execute("SELECT now()").fetchone()[0]]  # type: ignore[index]
                connection.execute("BEGIN")
                connection.execute("SELECT millpy.trim_history(%s, now() - %s, 7)", [table, since[0]])
                number += 1
                if number % 2:
                    connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
                connection.execute("COMMIT")

    thread = threading.Thread(target=trim)
    thread.start()
    try:
        yield since
    finally:
        stop.set()
        thread.join()

"""Compares what is in the database with what must be there; a check returns faults in words, none when all is well."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psycopg

from tests.crash.workload import Expected

US = "(extract(epoch FROM {}) * 1000000)::bigint"


def faults(url: str, expected: Expected) -> list[str]:
    """Everything that is wrong in a finished database."""
    with psycopg.connect(url, autocommit=True) as connection:
        return [
            *_windows(connection, expected),
            *_late(connection, expected),
            *_marks(connection, expected),
            *_groups(connection, expected),
            *_sources(connection, expected),
            *accounting_faults(connection),
            *_leftovers(connection),
        ]


def _differences(what: str, found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[str]:
    wrong = {key for key in found.keys() | wanted.keys() if found.get(key) != wanted.get(key)}
    if not wrong:
        return []
    shown = "; ".join(f"{key}: {found.get(key)} instead of {wanted.get(key)}" for key in sorted(wrong, key=repr)[:4])
    return [f"{what}: {len(wrong)} of {len(wanted)} differ: {shown}"]


def _unique(what: str, rows: Iterable[tuple[Any, ...]], keys: int) -> tuple[dict[Any, Any], list[str]]:
    found: dict[Any, Any] = {}
    twice = []
    for row in rows:
        if row[:keys] in found:
            twice.append(f"{what}: {row[:keys]} is there twice")
        found[row[:keys]] = row[keys:]
    return found, twice


def _windows(connection: psycopg.Connection, expected: Expected) -> list[str]:
    rows = connection.execute(
        f"SELECT device, {US.format('window_start')}, n, total, low, high, late_count FROM crash.per_window"
    ).fetchall()
    found, twice = _unique("per_window", rows, 2)
    return [*twice, *_differences("per_window", found, expected.windows)]


def _late(connection: psycopg.Connection, expected: Expected) -> list[str]:
    rows = connection.execute(
        "SELECT key::jsonb #>> '{}', window_start, count(*) FROM mill.late_records"
        " WHERE computation = 'per_window' GROUP BY 1, 2"
    ).fetchall()
    return _differences("late records", {row[:2]: row[2] for row in rows}, expected.late_records)


def _marks(connection: psycopg.Connection, expected: Expected) -> list[str]:
    rows = connection.execute(
        f'SELECT device, "group", kind, number, total, {US.format("event_time")} FROM crash.marks'
    ).fetchall()
    return _differences("marks", Counter(rows), expected.marks)


def _groups(connection: psycopg.Connection, expected: Expected) -> list[str]:
    rows = connection.execute(f'SELECT "group", {US.format("window_start")}, n, total FROM crash.per_group').fetchall()
    found, twice = _unique("per_group", rows, 2)
    totals = Counter(connection.execute('SELECT "group", period, marks FROM crash.totals').fetchall())
    return [
        *twice,
        *_differences("per_group", found, expected.per_group),
        *_differences("totals", totals, expected.totals),
    ]


def _sources(connection: psycopg.Connection, expected: Expected) -> list[str]:
    found = connection.execute(
        "SELECT injected, duplicate, dead_lettered, (SELECT count(*) FROM mill.dead_letters)"
        " FROM millpy.accounting WHERE consumer IS NULL"
    ).fetchall()
    wanted = [(expected.injected, expected.duplicates, expected.dead_letters, expected.dead_letters)]
    return [] if found == wanted else [f"source: {found} instead of {wanted}"]


def accounting_faults(connection: psycopg.Connection) -> list[str]:
    """I8, in one statement: at any moment."""
    rows = connection.execute("SELECT * FROM millpy.accounting")
    names = [column.name for column in rows.description or ()]
    wrong = []
    for row in rows:
        account = dict(zip(names, row, strict=True))
        if not account["balanced"]:
            wrong.append(f"accounting does not add up: {account}")
    return wrong


def _leftovers(connection: psycopg.Connection) -> list[str]:
    """No timer, window or hold is left, and every watermark has reached the end."""
    wrong = []
    for view in ("timers", "windows"):
        (count,) = connection.execute(f"SELECT count(*) FROM millpy.{view}").fetchone() or (0,)
        if count:
            wrong.append(f"{count} {view} are left")
    (behind,) = connection.execute(
        "SELECT count(*) FROM mill.intervals WHERE low_watermark < 4611686018427387904"
    ).fetchone() or (0,)
    if behind:
        wrong.append(f"{behind} intervals have not reached the end")
    return wrong


ORPHANS = {
    "segments": "SELECT count(*) FROM mill.segments s JOIN mill.intervals i ON i.interval_id = s.producer"
    " WHERE s.seq > i.bundle",
    "deltas": "SELECT count(*) FROM mill.deltas d JOIN mill.intervals i USING (interval_id) WHERE d.bundle > i.bundle",
}


def orphans(connection: psycopg.Connection) -> list[str]:
    """Rows of a bundle that its interval never committed."""
    counts = {what: (connection.execute(query).fetchone() or (0,))[0] for what, query in ORPHANS.items()}
    return [f"{count} orphaned {what}" for what, count in counts.items() if count]


HEADERS = "SELECT interval_id, low_watermark, sequencer, bundle FROM mill.intervals"
BEYOND = """
    SELECT c.consumer, c.producer, c.seq, c.watermark, p.bundle, p.low_watermark, i.input_watermark, i.low_watermark
    FROM mill.cursors c
    JOIN mill.intervals p ON p.interval_id = c.producer
    JOIN mill.intervals i ON i.interval_id = c.consumer
    WHERE c.seq > p.bundle OR c.watermark > p.low_watermark
       OR i.input_watermark > c.watermark OR i.low_watermark > i.input_watermark
"""
MISPLACED = """
    SELECT c.consumer, c.producer, c.seq, c.watermark, s.watermark
    FROM mill.cursors c JOIN mill.segments s USING (producer, seq)
    WHERE c.watermark <> s.watermark
"""


class Observer(threading.Thread):
    """Watches from outside while workers run and die: watermarks, sequencers and bundles never fall, I5 and I8 hold."""

    def __init__(self, url: str, every_s: float = 0.1) -> None:
        super().__init__(name="observer", daemon=True)
        self.url = url
        self.every_s = every_s
        self.faults: list[str] = []
        self.samples = 0
        self._newest: dict[int, tuple[int, int, int]] = {}
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Observer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.is_set():
            try:
                with psycopg.connect(self.url, autocommit=True) as connection:
                    while not self._ended.wait(self.every_s):
                        self.look(connection)
            except psycopg.ProgrammingError as error:
                self.faults.append(f"cannot look: {error}")
                return
            except psycopg.OperationalError:  # the server is down: a test has killed it
                self._ended.wait(self.every_s)

    def look(self, connection: psycopg.Connection) -> None:
        """Take one sample."""
        with self._lock:
            for interval_id, *header in connection.execute(HEADERS):
                newest = self._newest.get(interval_id)
                now = tuple(header)
                if newest is not None and any(a < b for a, b in zip(now, newest, strict=True)):
                    self.faults.append(f"interval {interval_id} went back from {newest} to {now}")
                self._newest[interval_id] = now  # type: ignore[assignment]
            self.faults.extend(f"beyond what was published: {row}" for row in connection.execute(BEYOND))
            self.faults.extend(f"watermark of another position: {row}" for row in connection.execute(MISPLACED))
            self.faults.extend(accounting_faults(connection))
            self.samples += 1

    def look_now(self) -> None:
        """A sample at this very moment: right after a kill."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            self.look(connection)

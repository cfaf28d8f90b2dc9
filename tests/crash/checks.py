"""Compares the database with the expected contents; a check returns descriptions of faults.

A fault of a result is of one kind: *lost* (fewer records than there must be), *doubled* (more), or *changed* (as many,
but not these). Everything else that must not be is a *violation*: a watermark that fell, accounting that does not add
up, a timer that is left, a worker that has failed.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import psycopg

from tests.crash.workload import Expected

US = "(extract(epoch FROM {}) * 1000000)::bigint"


Kind = Literal["lost", "doubled", "changed", "violation"]


class Fault(str):
    """A kind of fault, with its description and number."""

    __slots__ = ("count", "kind")
    kind: Kind
    count: int

    def __new__(cls, kind: Kind, text: str, count: int = 1) -> Self:
        fault = super().__new__(cls, f"{kind}: {text}")
        fault.kind, fault.count = kind, count
        return fault


def faults(url: str, expected: Expected) -> list[Fault]:
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


def differences(what: str, found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> list[Fault]:
    """Compare by key. A value is a number of records, or a tuple that begins with it."""
    wrong: dict[Kind, list[Any]] = {"lost": [], "doubled": [], "changed": []}
    for key in found.keys() | wanted.keys():
        if found.get(key) != wanted.get(key):
            wrong[_kind(found.get(key), wanted.get(key))].append(key)
    return [
        Fault(kind, f"{what}: {len(keys)} of {len(wanted)}: {_shown(keys, found, wanted)}", len(keys))
        for kind, keys in wrong.items()
        if keys
    ]


def _kind(found: Any, wanted: Any) -> Kind:
    if wanted is None:
        return "changed"  # no message can have this result
    more = _records(found) - _records(wanted)
    return "doubled" if more > 0 else "lost" if more < 0 else "changed"


def _records(value: Any) -> int:
    return 0 if value is None else value[0] if isinstance(value, tuple) else value


def _shown(keys: list[Any], found: Mapping[Any, Any], wanted: Mapping[Any, Any]) -> str:
    return "; ".join(f"{key}: {found.get(key)} instead of {wanted.get(key)}" for key in sorted(keys, key=repr)[:4])


def unique(what: str, rows: Iterable[tuple[Any, ...]], keys: int) -> tuple[dict[Any, Any], list[Fault]]:
    """Rows by their first columns, and those that are there twice."""
    found: dict[Any, Any] = {}
    twice = []
    for row in rows:
        if row[:keys] in found:
            twice.append(Fault("doubled", f"{what}: {row[:keys]} is there twice"))
        found[row[:keys]] = row[keys:]
    return found, twice


def _windows(connection: psycopg.Connection, expected: Expected) -> list[Fault]:
    rows = connection.execute(
        f"SELECT device, {US.format('window_start')}, n, total, low, high, late_count FROM crash.per_window"
    ).fetchall()
    found, twice = unique("per_window", rows, 2)
    return [*twice, *differences("per_window", found, expected.windows)]


def _late(connection: psycopg.Connection, expected: Expected) -> list[Fault]:
    rows = connection.execute(
        "SELECT key::jsonb #>> '{}', window_start, count(*) FROM mill.late_records"
        " WHERE computation = 'per_window' GROUP BY 1, 2"
    ).fetchall()
    return differences("late records", {row[:2]: row[2] for row in rows}, expected.late_records)


def _marks(connection: psycopg.Connection, expected: Expected) -> list[Fault]:
    rows = connection.execute(
        f'SELECT device, "group", kind, number, total, {US.format("event_time")} FROM crash.marks'
    ).fetchall()
    return differences("marks", Counter(rows), expected.marks)


def _groups(connection: psycopg.Connection, expected: Expected) -> list[Fault]:
    rows = connection.execute(f'SELECT "group", {US.format("window_start")}, n, total FROM crash.per_group').fetchall()
    found, twice = unique("per_group", rows, 2)
    totals = Counter(connection.execute('SELECT "group", period, marks FROM crash.totals').fetchall())
    return [
        *twice,
        *differences("per_group", found, expected.per_group),
        *differences("totals", totals, expected.totals),
    ]


def _sources(connection: psycopg.Connection, expected: Expected) -> list[Fault]:
    row = connection.execute(
        "SELECT injected, duplicate, dead_lettered, (SELECT count(*) FROM mill.dead_letters)"
        " FROM millpy.accounting WHERE source_partition IS NOT NULL"
    ).fetchone()
    names = ("injected", "duplicates", "dead-lettered", "dead letters")
    wanted = (expected.injected, expected.duplicates, expected.dead_letters, expected.dead_letters)
    return differences("source", dict(zip(names, row or (0,) * 4, strict=True)), dict(zip(names, wanted, strict=True)))


def accounting_faults(connection: psycopg.Connection) -> list[Fault]:
    """I8, in one statement: at any moment."""
    rows = connection.execute("SELECT * FROM millpy.accounting")
    names = [column.name for column in rows.description or ()]
    wrong = []
    for row in rows:
        account = dict(zip(names, row, strict=True))
        if not account["balanced"]:
            wrong.append(Fault("violation", f"accounting does not add up: {account}"))
    return wrong


def _leftovers(connection: psycopg.Connection) -> list[Fault]:
    """No timer, window or hold is left, and every watermark has reached the end."""
    wrong = []
    for view in ("timers", "windows"):
        (count,) = connection.execute(f"SELECT count(*) FROM millpy.{view}").fetchone() or (0,)
        if count:
            wrong.append(Fault("violation", f"{count} {view} are left", count))
    (behind,) = connection.execute(
        "SELECT count(*) FROM mill.intervals WHERE low_watermark < 4611686018427387904"
    ).fetchone() or (0,)
    if behind:
        wrong.append(Fault("violation", f"{behind} intervals have not reached the end", behind))
    return wrong


ORPHANS = {
    "segments": "SELECT count(*) FROM mill.segments s JOIN mill.intervals i ON i.interval_id = s.producer"
    " WHERE s.seq > i.bundle",
    "deltas": "SELECT count(*) FROM mill.deltas d JOIN mill.intervals i USING (interval_id) WHERE d.bundle > i.bundle",
}


def headers_of(connection: psycopg.Connection) -> list[tuple[int, int, Header]]:
    """Each interval, the process id of its owner, and its header."""
    return [(interval_id, pid, (a, b, c)) for interval_id, pid, a, b, c in connection.execute(HEADERS)]


def orphans(connection: psycopg.Connection) -> list[Fault]:
    """Rows of a bundle that its interval never committed."""
    counts = {what: (connection.execute(query).fetchone() or (0,))[0] for what, query in ORPHANS.items()}
    return [Fault("violation", f"{count} orphaned {what}", count) for what, count in counts.items() if count]


HEADERS = """
    SELECT i.interval_id, w.pid, i.sequencer, i.bundle, i.low_watermark
    FROM mill.intervals i LEFT JOIN mill.workers w USING (worker_id)
"""
Header = tuple[int, int, int]
"""The sequencer, bundle and low watermark of an interval."""
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
    """Watches from outside while workers run and die: watermarks, sequencers and bundles never fall, I5 and I8 hold.

    It looks for at most a fifth of the time: on a busy machine its statements would slow down what it watches.
    """

    def __init__(self, url: str, every_s: float = 0.1) -> None:
        super().__init__(name="observer", daemon=True)
        self.url = url
        self.every_s = every_s
        self.faults: list[Fault] = []
        self.samples = 0
        self._newest: dict[int, Header] = {}
        self._owned: dict[int, dict[int, Header]] = {}
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
                    took_s = 0.0
                    while not self._ended.wait(max(self.every_s, 4 * took_s)):
                        started = time.monotonic()
                        self.look(connection)
                        took_s = time.monotonic() - started
            except psycopg.ProgrammingError as error:
                self._note(f"cannot look: {error}")
                return
            except psycopg.OperationalError:  # the server is down: a test has killed it
                self._ended.wait(self.every_s)

    def look(self, connection: psycopg.Connection) -> None:
        """Take one sample."""
        with self._lock:
            owned: dict[int, dict[int, Header]] = defaultdict(dict)
            for interval_id, pid, now in headers_of(connection):
                newest = self._newest.get(interval_id)
                if newest is not None and any(a < b for a, b in zip(now, newest, strict=True)):
                    self._note(f"interval {interval_id} went back from {newest} to {now}")
                self._newest[interval_id] = owned[pid][interval_id] = now
            self._owned |= owned
            for row in connection.execute(BEYOND):
                self._note(f"beyond what was published: {row}")
            for row in connection.execute(MISPLACED):
                self._note(f"watermark of another position: {row}")
            self.faults.extend(accounting_faults(connection))
            self.samples += 1

    def _note(self, text: str) -> None:
        self.faults.append(Fault("violation", text))

    def last_owned_by(self, pids: Iterable[int]) -> dict[int, Header]:
        """Return what processes owned when they were last seen to own something: sequencer, bundle, low watermark."""
        with self._lock:
            return {interval: header for pid in pids for interval, header in self._owned.get(pid, {}).items()}

    def look_now(self) -> None:
        """A sample at this very moment: right after a kill."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            self.look(connection)

"""The recorded feeds: as files, as messages, and what their tables must hold in the end."""

from __future__ import annotations

import csv
import gzip
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
DAY_S = 86_400
THE_END = "the end"
"""Key of the message that closes all windows of a feed that has no end of its own."""

Row = dict[str, Any]
Message = tuple[str, bytes]
Table = dict[tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Feed:
    """One recorded feed.

    Attributes:
        per_s: its unit of time.
        keys: key columns of its tables.
        injectors: how many its graph has.
        tables: names of the expected tables; ours have the same, behind a session's name where there is one.
        lanes: messages, in order within each lane.
        split: names of the files besides its own, and which rows they hold.
    """

    name: str
    per_s: int
    keys: tuple[str, ...]
    injectors: int
    tables: tuple[str, ...]
    file: str
    lanes: Callable[[Feed], list[Iterator[Message]]]
    split: dict[str, Callable[[Row], bool]]
    hello: tuple[str, ...]
    """Topics on which every injector hears a message."""

    @property
    def graph(self) -> Path:
        return Path(__file__).with_name("graphs") / f"{self.name}.py"

    def rows(self) -> Iterator[Row]:
        with gzip.open(DATA / self.name / self.file, "rt", newline="") as lines:
            yield from csv.DictReader(lines)

    def write_files(self, directory: Path) -> None:
        shutil.copy(DATA / self.name / self.file, directory)
        everything = list(self.rows()) if self.split else []
        for name, holds in self.split.items():
            rows = [row for row in everything if holds(row)]
            with (directory / name).open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys())
                writer.writeheader()
                writer.writerows(rows)

    def expected(self, table: str) -> list[Row]:
        found: list[Row] = pq.read_table(DATA / self.name / "expected" / f"{table}.parquet").to_pylist()
        return found

    @cached_property
    def ends_at(self) -> int:
        """An instant after all windows, in the feed's own unit."""
        ends = [row["window_end"] for name in self.tables if "dupl" not in name for row in self.expected(name)]
        return int(max(ends))

    def check(self, url: str) -> dict[str, tuple[int, int]]:
        """Table -> (expected rows, differences)."""
        found = {}
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone TO 'UTC'")
            for table in self.tables:
                wanted = self.expected(table)
                if table.startswith("duplicates"):
                    wrong = _differences(
                        self._stored_duplicates(connection, table), {tuple(r.values()): () for r in wanted}
                    )
                elif table.startswith("late"):
                    wrong = self._late_differences(connection, table, wanted)
                else:
                    columns = [name for name in wanted[0] if name not in (*self.keys, "window_start", "window_end")]
                    of = {self._name(row): tuple(row[c] for c in columns) for row in wanted}
                    wrong = _differences(self._stored_windows(connection, table, columns), of)
                found[table] = (len(wanted), wrong)
        return found

    def _name(self, row: Row) -> tuple[Any, ...]:
        return (*(row[key] for key in self.keys), row["window_start"], row["window_end"])

    def _parts(self, table: str) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
        """(first part of the key, our table, its key columns)."""
        if self.keys[0] != "session":
            return [((), table, self.keys)]
        return [((f"d-{n}",), f"d_{n}_{table}", self.keys[1:]) for n in range(1, 6)]

    def _stored_windows(self, connection: psycopg.Connection, table: str, columns: list[str]) -> Table:
        found: Table = {}
        for prefix, name, keys in self._parts(table):
            query = f"SELECT {', '.join(keys)}, {self._time('window_start')}, {self._time('window_end')}"
            query += f", {', '.join(columns)} FROM {self.name}.{name} WHERE {keys[0]} <> '{THE_END}'"
            width = len(keys) + 2
            found |= {(*prefix, *row[:width]): row[width:] for row in connection.execute(query).fetchall()}  # type: ignore[call-overload]
        return found

    def _stored_duplicates(self, connection: psycopg.Connection, table: str) -> Table:
        query = f"SELECT arrival_seq, device, fcnt, arrival_ms FROM {self.name}.{table}"
        return {row: () for row in connection.execute(query).fetchall()}  # type: ignore[call-overload]

    def _late_differences(self, connection: psycopg.Connection, table: str, wanted: list[Row]) -> int:
        accepted = {
            self._name(row): (row["n_on_time"] + row["n_late_accepted"], row["n_late_accepted"])
            for row in wanted
            if row["n_on_time"] + row["n_late_accepted"]
        }
        dropped = {self._name(row): (row["n_dropped"],) for row in wanted if row["n_dropped"]}
        late: Table = {}
        for prefix, name, _ in self._parts(table):
            query = (
                "SELECT key::jsonb #>> '{}', window_start / 1000, window_end / 1000, count(*) FROM mill.late_records"
                " WHERE computation = %s GROUP BY 1, 2, 3"
            )
            late |= {(*prefix, *row[:3]): row[3:] for row in connection.execute(query, [name]).fetchall()}
        windows = self._stored_windows(connection, table, ["n", "late_count"])
        return _differences(windows, accepted) + _differences(late, dropped)

    def _time(self, column: str) -> str:
        return f"(extract(epoch FROM {column}) * {self.per_s})::bigint"


def _differences(found: Table, wanted: Table) -> int:
    """Rows that are missing, too many or different; floats to 1e-9."""
    wrong = len(found.keys() ^ wanted.keys())
    return wrong + sum(not all(map(_same, found[name], wanted[name])) for name in found.keys() & wanted.keys())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
    return bool(one == other)


def _number(text: str) -> float | None:
    return float(text) if text else None


def _ooo_lanes(feed: Feed) -> list[Iterator[Message]]:
    rows = sorted(feed.rows(), key=lambda row: int(row["arrival_seq"]))

    def lane(session: str) -> Iterator[Message]:
        topic = f"ooo/{session.replace('-', '_')}"
        for row in rows:
            if row["session"] == session:
                yield topic, _ooo_message(row["device"], int(row["seq"]), int(row["event_ms"]), float(row["rtt_ms"]))
        yield topic, _ooo_message(THE_END, 0, feed.ends_at + DAY_S * 1000, 0.0)

    return [lane(f"d-{n}") for n in range(1, 6)]


def _ooo_message(device: str, seq: int, event_ms: int, rtt_ms: float) -> bytes:
    return json.dumps({"device": device, "seq": seq, "event_ms": event_ms, "rtt_ms": rtt_ms}).encode()


def _campus_lanes(feed: Feed) -> list[Iterator[Message]]:
    def lane() -> Iterator[Message]:
        last = 0
        for row in feed.rows():
            last = max(last, int(row["arrival_ms"]))
            frame: Row = {
                name: int(row[name]) for name in ("arrival_seq", "arrival_ms", "fcnt", "event_ms") if row[name]
            }
            frame |= {"device": row["device"], "temperature_c": _number(row["temperature_c"])}
            yield f"campus/{row['network']}", json.dumps(frame).encode()
        end = {"arrival_seq": 0, "arrival_ms": last + DAY_S * 1000, "event_ms": feed.ends_at + DAY_S * 1000}
        yield "campus/helium", json.dumps(end | {"device": THE_END, "fcnt": 0}).encode()

    return [lane()]


def _home_lanes(feed: Feed) -> list[Iterator[Message]]:
    def lane() -> Iterator[Message]:
        for row in feed.rows():
            reading = {"event_s": int(row["event_s"]), "value": float(row["value"])}
            yield f"home/{row['room']}/{row['sensor']}", json.dumps(reading).encode()
        yield f"home/{THE_END}/none", json.dumps({"event_s": feed.ends_at + DAY_S, "value": 0.0}).encode()

    return [lane()]


def _of_session(session: str) -> Callable[[Row], bool]:
    return lambda row: bool(row["session"] == session)


FEEDS = {
    feed.name: feed
    for feed in (
        Feed(
            "campusiot_lorawan",
            1000,
            ("device",),
            4,
            (
                "duplicates_ttl600s",
                "late_w1min_bound2s_lateness0s",
                "late_w1min_bound2s_lateness600s",
                "sessions_gap_30min_dedup",
                "tumbling_10min_dedup",
                "tumbling_10min_raw",
            ),
            "frames.csv.gz",
            _campus_lanes,
            {"helium.csv": lambda row: bool(row["network"] == "helium")},
            ("campus/helium",),
        ),
        Feed(
            "ooo_umts",
            1000,
            ("session", "device"),
            10,
            (
                "late_w1s_bound2000ms_lateness0ms",
                "late_w1s_bound250ms_lateness0ms",
                "late_w1s_bound250ms_lateness1000ms",
                "sessions_gap_1000ms",
                "sliding_10s_every_2s",
                "tumbling_10min",
                "tumbling_10s",
            ),
            "events.csv.gz",
            _ooo_lanes,
            {f"d_{n}.csv": _of_session(f"d-{n}") for n in range(1, 6)},
            tuple(f"ooo/d_{n}" for n in range(1, 6)),
        ),
        Feed(
            "open_smart_home",
            1,
            ("room", "sensor"),
            1,
            ("sessions_gap_30min", "tumbling_10min"),
            "readings.csv.gz",
            _home_lanes,
            {},
            ("home/hello/hello",),
        ),
    )
}

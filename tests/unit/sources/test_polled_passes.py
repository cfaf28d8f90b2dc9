"""Passes over a polled table, by a model: they end anywhere, and each row counts once."""

from __future__ import annotations

import asyncio
import bisect
import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from millpy import PolledTable
from millpy.clock import SystemClock
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.postgres import polled_position, polled_rows, polled_thread
from millpy.sources.postgres.page_thread import TablePage
from millpy.sources.postgres.polled_position import Key, PolledPosition
from millpy.sources.postgres.polled_thread import PolledThread
from millpy.sources.postgres.table_checks import SortColumn, TableFacts
from millpy.sources.postgres.table_copy import CopyPiece, KeyRange

LAG = 10
FACTS = TableFacts(
    (SortColumn("n", "numeric", None, "pg_catalog"), SortColumn("id", "text", 'pg_catalog."C"', "pg_catalog")),
    ("n", "id"),
)
Row = tuple[int, str]
"""The value and the key of a row, in the order of the table."""


END = (10**6, "")
"""The last row: all before it are safe at the end."""


class LostConnectionError(Exception):
    pass


class Records:
    def layout(self, columns: Any) -> None:
        del columns

    def of_row(self, layout: Any, row: Sequence[bytes | None], at: int) -> bytes:
        del layout, at
        return b"%s %s" % (row[0], row[1])


class ModelThread(PolledThread):
    """A reader whose pages `world` takes."""

    world: PolledWorld

    def _look_at_table(self, connection: Any) -> TableFacts:
        del connection
        return FACTS

    def _put_page(self, page: TablePage) -> None:
        self.world.put_page(page)


class PolledWorld:
    """A table, the transactions that add rows, a reader, and the turns that take what it has read."""

    def __init__(self, seed: int, keys_max: int) -> None:
        self.rng, self.keys_max = random.Random(seed), keys_max
        self.now = 0
        self.open: list[tuple[int, Row]] = []
        self.rows: list[Row] = []
        self.deleted: set[Row] = set()
        self.taken: list[Row] = []
        self.put: set[Row] = set()
        self.owed: set[Row] = set()
        self.stored: bytes | None = None
        self.pages: deque[TablePage] = deque()
        self.tops: deque[tuple[int, Row]] = deque()
        self.crashes = self.late = 0
        self.failures = 0.02
        self.start()

    def start(self) -> None:
        setup = SourceSetup(
            graph="g", stream="s", partition="public.t", limits=Limits(bundle_records_max=self.rng.randint(2, 9)),
            clock=SystemClock(), ready=asyncio.Event(), secret="x",
        )  # fmt: skip
        position = None if self.stored is None else msgspec.json.decode(self.stored, type=PolledPosition)
        self.thread = ModelThread(setup, PolledTable("t", column="n"), "", position, lambda call: call())
        self.thread.world = self
        self.pages.clear()
        self.tops.clear()
        self.put = set(self.taken)

    def tick(self) -> None:
        """Let time pass: transactions begin and commit, and rows are deleted."""
        self.now += 1
        for _ in range(self.rng.choice((0, 1, 1, 4))):
            row = (self.now // 100, f"{self.rng.randrange(10**6):06}")
            self.open.append((self.now + self.rng.randrange(LAG), row))
        for _, row in [entry for entry in self.open if entry[0] <= self.now]:
            if row not in self.rows and row not in self.deleted:
                bisect.insort(self.rows, row)
        self.open = [entry for entry in self.open if entry[0] > self.now]
        if self.rows and self.rng.random() < 0.05:
            row = self.rows.pop(self.rng.randrange(len(self.rows)))
            self.deleted.add(row)

    def text(self, row: Row) -> Key:
        """Return the key of a row; the text of its value varies."""
        return (self.rng.choice(("{}", "{}.0", "{}.00")).format(row[0]), row[1])

    def pieces(
        self, connection: Any, table: Any, facts: TableFacts, wanted: KeyRange, *, rows_max: int, bytes_max: int
    ) -> Iterator[CopyPiece]:
        """Yield rows as `table_copy.pieces`: each statement has its own snapshot."""
        del connection, table, facts, bytes_max
        after, upto = wanted.after and row_of(wanted.after), row_of(wanted.upto or ())
        while True:
            if self.rng.random() < self.failures:
                raise LostConnectionError
            if self.failures and self.rng.random() < 0.2:
                self.tick()
            begin = bisect.bisect_right(self.rows, after) if after else 0
            found = self.rows[begin : bisect.bisect_right(self.rows, upto)]
            found = [row for row in found if row[0] == upto[0] or not wanted.of_one_value][:rows_max]
            if found:
                keys = list(map(self.text, found))
                yield CopyPiece([], [tuple(part.encode() for part in key) for key in keys], keys)
            if len(found) < rows_max:
                return
            after = found[-1]

    def put_page(self, page: TablePage) -> None:
        self.pages.append(page)
        rows = list(map(row_of_payload, page.payloads))
        self.put.update(rows)
        while self.pages and self.rng.random() < 0.6:
            self.take()

    def take(self) -> None:
        """Commit a part of the first page, and its position."""
        page = self.pages[0]
        end = min(len(page.payloads), page.begin + self.rng.randint(1, 6))
        self.taken += map(row_of_payload, page.payloads[page.begin : end])
        position = page.position_of(end - 1)
        assert len(position.read) + len(position.ahead) <= self.keys_max
        self.stored = msgspec.json.encode(position)
        page.begin = end
        if end == len(page.payloads):
            self.pages.popleft()
        if self.rng.random() < 8 * self.failures:
            raise InterruptedError

    def look(self) -> None:
        """Read up to the row that was the last one a lag ago."""
        if self.rows and (not self.tops or self.tops[-1][1] != self.rows[-1]):
            self.tops.append((self.now, self.rows[-1]))
        safe = None
        while self.tops and self.tops[0][0] < self.now - LAG:
            safe = self.tops.popleft()[1]
        if safe is not None:
            self.note_owed()
            self.thread._read_to(None, FACTS, Records(), self.text(safe))  # type: ignore[arg-type]

    def note_owed(self) -> None:
        """Note which rows are behind the last one read, or have less than the bound behind them."""
        last = max(self.put, default=(-1, ""))
        for row in self.rows:
            if row not in self.put and row not in self.owed:
                behind = [other for other in self.put if other[0] == row[0] and (other > row or other in self.deleted)]
                if row > last or (row[0] == last[0] and len(behind) < self.keys_max):
                    self.owed.add(row)
                    self.late += row < last

    def run(self) -> None:
        for turn in range(700):
            if turn < 500:
                self.tick()
            elif turn == 500:
                self.rows, self.open = sorted({*self.rows, *(row for _, row in self.open)} - self.deleted), []
                self.failures = 0
            elif turn == 550:
                self.rows.append(END)
            self.now += turn >= 500
            try:
                self.look()
                while self.pages and (turn > 650 or self.rng.random() < 0.3):
                    self.take()
            except LostConnectionError:  # the pages remain
                self.tops.clear()
            except InterruptedError:
                self.crashes += 1
                self.start()


def row_of(key: Key) -> Row:
    return (int(float(key[0])), key[1]) if key else END


def row_of_payload(payload: bytes) -> Row:
    value, key = payload.decode().split(" ")
    return row_of((value, key))


def equal_pairs(connection: Any, column: Any, pairs: Sequence[tuple[str, str]]) -> list[int]:
    del connection, column
    return [place for place, (one, other) in enumerate(pairs) if float(one) == float(other)]


@pytest.mark.parametrize("keys_max", [4, 1_000])
@pytest.mark.parametrize("seed", range(12))
def test_each_row_that_commits_within_the_lag_is_read_once(
    seed: int, keys_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound, a row may be missed; all others are read, whatever a partial take and a crash interrupt."""
    world = PolledWorld(seed, keys_max)
    monkeypatch.setattr(polled_position, "KEYS_MAX", keys_max)
    monkeypatch.setattr(polled_rows, "QUERY_ROWS_MAX", world.rng.randint(2, 20))
    monkeypatch.setattr(polled_rows, "pieces", world.pieces)
    monkeypatch.setattr(polled_thread, "pieces", world.pieces)
    monkeypatch.setattr(polled_rows, "equal_pairs", equal_pairs)
    world.run()

    assert world.crashes > 3
    assert world.late > 3
    assert len(world.taken) == len(set(world.taken)), "a row was read twice"
    assert world.owed - world.deleted <= set(world.taken), "a row was missed"
    if keys_max == 1_000:
        assert set(world.rows) - {END} <= set(world.taken)

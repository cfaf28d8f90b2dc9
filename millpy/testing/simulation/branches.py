"""I9 of the branches: each consumer's results against a recount of what it has consumed, at every bundle and at last.

`Branches` has one judge for each interval behind the source. It is told what has landed, follows the oracle to the same
positions, and says in words what differs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millpy.model.time import INSTANT_MAX
from millpy.store.memory_tables import Row
from millpy.testing.simulation.books import Book, Books, Landing
from millpy.testing.simulation.oracle import SourceOracle
from millpy.testing.simulation.recount import Follower, PaneName, Unique, Windows, operated

KINDS = {"per_window": "fixed", "per_op": "fixed", "per_slide": "sliding", "per_session": "session"}
"""Windowed tables, and what their windows are."""
ECHOES = ("parks", "sets_aside")


@dataclass(slots=True)
class WindowJudge:
    """One interval of windows.

    Attributes:
        emitted: window -> its newest row, also when people have deleted it since.
        homes: keys that are known to be this interval's.
    """

    table: str
    key: str
    follower: Follower
    windows: Windows
    emitted: dict[PaneName, Row] = field(default_factory=dict)
    homes: set[Any] = field(default_factory=set)

    def follow(self, landing: Landing) -> Iterator[str]:
        """Take a bundle in."""
        for truth, least, most in self.follower.advance(landing.book.cursors):
            if self.table == "per_op":
                for value in operated(truth):
                    self.windows.take(truth.group, truth.at, value, least, most)
            else:
                self.windows.take(truth.device, truth.at, truth.value, least, most)
        self.homes.update(name[2] for name in landing.changes if name[0] == "window")
        for row in landing.rows.get(self.table, ()):
            name = (row[self.key], row["window_start"], row["window_end"])
            self.homes.add(name[0])
            self.emitted[name] = row
            expected = self.windows.panes.get(name)
            if self.windows.is_sure(*name[:2]) and (expected is None or not expected.agrees(row)):
                yield f"window {name} has {_shown(row)} instead of {expected}"
        yield from self._due()

    def _due(self) -> Iterator[str]:
        """Windows that the watermark has passed have their rows."""
        watermark = self.follower.watermark
        for name in [name for name in self.windows.unproven if name[2] <= watermark]:
            if name[2] + self.windows.allowed_us <= watermark:
                self.windows.unproven.discard(name)
            if name[0] not in self.homes or not self.windows.is_sure(*name[:2]):
                continue
            row, expected = self.emitted.get(name), self.windows.panes[name]
            if row is None or not expected.agrees(row):
                yield f"window {name} should have {expected} by now, it has {None if row is None else _shown(row)}"

    def finished(self) -> Iterator[str]:
        """The newest rows are those of the recount, and no others."""
        mine = {name for name in self.windows.panes if name[0] in self.homes}
        for name in mine | {name for name in self.emitted if self.table != "per_session"}:
            if not self.windows.is_sure(*name[:2]):
                continue
            row, expected = self.emitted.get(name), self.windows.panes.get(name)
            if row is None or expected is None or not expected.agrees(row):
                yield f"{self.table}: {name} has {None if row is None else _shown(row)} instead of {expected}"

    def left(self) -> dict[PaneName, Row]:
        """Rows that the table has to have, unless somebody deletes them."""
        if self.table != "per_session":
            return self.emitted
        return {
            n: row for n, row in self.emitted.items() if n in self.windows.panes or not self.windows.is_sure(*n[:2])
        }


@dataclass(slots=True)
class UniqueJudge:
    """One interval of the deduplicating step: found, by id, the numbers of the readings that were let through."""

    follower: Follower
    unique: Unique = field(default_factory=Unique)
    found: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def follow(self, landing: Landing) -> Iterator[str]:
        """Take a bundle in."""
        for consumed in self.follower.advance(landing.book.cursors):
            self.unique.take(*consumed)
        touched = set()
        for row in landing.rows.get("uniques", ()):
            name = (row["device"], row["kind"])
            self.found.setdefault(name, []).append(row["seq"])
            touched.add(name)
        for name in touched - self.unique.unsure:
            yield from self._compared(name)

    def _compared(self, name: tuple[str, int]) -> Iterator[str]:
        found = self.found.get(name, [])
        expected = [seq for _, seq in self.unique.accepted.get(name, ())]
        if found != expected:
            yield f"of {name} the readings {found[-5:]} were let through instead of {expected[-5:]}"

    def finished(self) -> Iterator[str]:
        """All that should have been let through were."""
        for name in self.found.keys() - self.unique.unsure:
            yield from self._compared(name)


@dataclass(slots=True)
class EchoJudge:
    """One interval of a Computation that fails for a while: every reading is seen once, in its device's order.

    Attributes:
        rows: device -> readings, as they were seen.
        aside: devices that had readings set aside.
        consumed: device -> readings, as they came.
    """

    interval_id: int
    computation: str
    books: Books
    follower: Follower
    consumed: dict[str, list[int]] = field(default_factory=dict)
    rows: dict[str, list[int]] = field(default_factory=dict)
    aside: set[str] = field(default_factory=set)

    def follow(self, landing: Landing) -> Iterator[str]:
        """Take a bundle in."""
        touched = {truth.device for truth, _, _ in self._advance(landing.book)}
        for row in sorted(landing.rows.get(f"{self.computation}_echoes", ()), key=lambda row: row["number"]):
            seen = self.rows.setdefault(row["device"], [])
            seen.append(row["seq"])
            touched.add(row["device"])
            if row["number"] != len(seen):
                yield f"reading {row['seq']} is number {row['number']} of {row['device']} instead of {len(seen)}"
        touched.update(name[2] for name in landing.changes if name[0] == "parked")
        if touched:
            yield from self._compared(landing.book, touched)

    def _advance(self, book: Book) -> Sequence[tuple[Any, int, int]]:
        found = self.follower.advance(book.cursors)
        for truth, _, _ in found:
            self.consumed.setdefault(truth.device, []).append(truth.seq)
        return found

    def _compared(self, book: Book, devices: set[str]) -> Iterator[str]:
        """What was seen, waits, or is set aside is what came."""
        waiting = self._waiting(book)
        aside = self._set_aside(book)
        self.aside.update(aside)
        for device in devices & (self.rows.keys() | waiting.keys() | aside.keys()):
            expected, rows = self.consumed.get(device, []), self.rows.get(device, [])
            if self.computation == "parks":  # in order: what was seen, then what waits
                gone, left = Counter(aside.get(device, ())), []
                for seq in expected:  # a reading may come twice, behind the horizon, and be set aside once
                    if gone[seq]:
                        gone[seq] -= 1
                    else:
                        left.append(seq)
                agrees = [*rows, *waiting.get(device, ())] == left
            else:
                agrees = sorted([*rows, *aside.get(device, ())]) == sorted(expected)
            if not agrees:
                yield (
                    f"{device}: {expected[-8:]} came last, {rows[-8:]} were seen last, {waiting.get(device, [])[:8]} "
                    f"wait, {aside.get(device, [])[-8:]} are set aside ({len(expected)} came, {len(rows)} were seen)"
                )

    def _waiting(self, book: Book) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        parked = [n for n in book.keyed if n[0] == "parked" and n[1] != "key"]
        for name in sorted(parked, key=lambda name: name[3]):
            found.setdefault(name[2], []).append(book.keyed[name][0]["record"]["seq"])
        return found

    def _set_aside(self, book: Book) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for number, interval_id, _, letter in self.books.dead_letters():
            if interval_id == book.interval_id and letter.computation == self.computation:
                standing = self.books.database.requests.standing("dead_letters", number)
                if standing.state != "replayed":
                    record = json.loads(letter.payload)
                    found.setdefault(record["device"], []).append(record["seq"])
        return found

    def finished(self) -> Iterator[str]:
        """Nothing is missing."""
        book = self.books.by_interval[self.interval_id]
        yield from self._compared(book, set(self.consumed))


Judge = WindowJudge | UniqueJudge | EchoJudge


class Branches:
    """The judges of all intervals behind the source but for the watcher's."""

    def __init__(self, books: Books, sources: Mapping[int, SourceOracle], lateness_us: int) -> None:
        self.books = books
        self._sources = sources
        self._lateness_us = lateness_us
        self.judges: dict[int, Judge] = {}
        self._makers: dict[str, Callable[[Book], Judge]] = {
            **dict.fromkeys(KINDS, self._windows),
            **dict.fromkeys(ECHOES, self._echoes),
            "unique": self._unique,
        }
        for book in books.by_interval.values():
            if (make := self._makers.get(book.computation)) is not None:
                self.judges[book.interval_id] = make(book)

    def _windows(self, book: Book) -> Judge:
        table = book.computation
        allowed_us = 0 if table == "per_op" else self._lateness_us
        key = "group" if table == "per_op" else "device"
        return WindowJudge(table, key, Follower(self._sources), Windows(KINDS[table], allowed_us))

    def _echoes(self, book: Book) -> Judge:
        return EchoJudge(book.interval_id, book.computation, self.books, Follower(self._sources))

    def _unique(self, book: Book) -> Judge:
        return UniqueJudge(Follower(self._sources))

    def landed(self, landing: Landing) -> Iterator[str]:
        """I9: results are a function of the input up to the position consumed."""
        judge = self.judges.get(landing.book.interval_id)
        if judge is not None:
            for what in judge.follow(landing):
                yield f"bundle {landing.bundle} of {landing.book.computation} {landing.book.interval_id}: {what}"

    def finished(self) -> Iterator[str]:
        """The end: results and late records are those of the recount."""
        late = list(self._late())  # which says where keys are of which every record was late
        for judge in self.judges.values():
            yield from judge.finished()
        for table in KINDS:
            judges = [j for j in self.judges.values() if isinstance(j, WindowJudge) and j.table == table]
            if judges:
                yield from self._whole_table(table, judges)
        for computation in ECHOES:
            echoes = [j for j in self.judges.values() if isinstance(j, EchoJudge) and j.computation == computation]
            for device in {device for judge in echoes for device in judge.consumed}:
                if not any(device in judge.rows or device in judge.aside for judge in echoes):
                    yield f"{computation}: nothing of {device} was ever seen"
        yield from late

    def _whole_table(self, table: str, judges: Sequence[WindowJudge]) -> Iterator[str]:
        known = [row for judge in judges for row in judge.left().values()]
        for row in self.books.rows(table):
            if not any(row is other for other in known):
                yield f"{table} holds a row that never landed, or should have gone: {row}"
        homeless = {name[0] for judge in judges for name in judge.windows.panes if judge.windows.is_sure(*name[:2])}
        for key in homeless - set().union(*(judge.homes for judge in judges)):
            yield f"{table}: nothing of {key} was ever seen"

    def _late(self) -> Iterator[str]:
        found: dict[int, Counter[Any]] = {interval_id: Counter() for interval_id in self.judges}
        for interval_id, rows in self.books.late_records():
            judge = self.judges.get(interval_id)
            for key, start in zip(map(json.loads, rows.keys), rows.window_starts, strict=True):
                if isinstance(judge, WindowJudge):
                    found[interval_id][key, None if judge.windows.kind == "session" else start] += 1
                    judge.homes.add(key)
                elif isinstance(judge, UniqueJudge):
                    found[interval_id][tuple(key)] += 1
                elif min(rows.watermarks) < INSTANT_MAX:  # what is taken again behind the end is late for everybody
                    yield f"{len(rows)} records are late for {rows.computation}, which waits for hours"
        for interval_id, judge in self.judges.items():
            if isinstance(judge, EchoJudge):
                continue
            if isinstance(judge, WindowJudge):
                windows = judge.windows
                expected = {n: c for n, c in windows.late.items() if n[0] in judge.homes and windows.is_sure(*n)}
                seen = {n: c for n, c in found[interval_id].items() if windows.is_sure(*n)}
            else:
                unique = judge.unique
                expected = {n: c for n, c in unique.late.items() if n in judge.found and n not in unique.unsure}
                seen = {n: c for n, c in found[interval_id].items() if n in judge.found and n not in unique.unsure}
            if expected != seen:
                wrong = [name for name in {**expected, **seen} if expected.get(name) != seen.get(name)]
                name = wrong[0]
                yield (
                    f"late records of {interval_id}: {len(wrong)} differ: {name} has {seen.get(name)} instead of "
                    f"{expected.get(name)}"
                )


def _shown(row: Row) -> list[Any]:
    return [row["n"], row["total"], row["low"], row["high"], row["late_count"]]

"""Workers that die in the middle of a file of a watched directory: every record of every file counts once."""

from __future__ import annotations

import gzip
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import psycopg

from tests.crash.checks import Observer, accounting_faults
from tests.crash.harness import Worker, await_true

GRAPH = Path(__file__).with_name("directory_graph.py")
SOURCES = ("in_1", "in_3")
"""Of one partition, and of three."""
DEVICES = 7
BUNDLE = 10
FEW, MANY = 30, 1_000
SMALL = ("0-gamma.ndjson", "0-north.ndjson", "0-south.ndjson")
"""One of each of three partitions: whatever a worker dies over, its partition has read a file to the end before."""
MARGIN_BYTES = 6 * BUNDLE * 60
"""At least so much of a file is left when its reader is killed, whatever it has in the air: turns of a bundle each."""
POSITIONS = """
SELECT c.name, p.interval_id, w.pid, e.value -> 'position' ->> 'path', (e.value -> 'position' ->> 'offset')::bigint
  FROM mill.entries AS e JOIN mill.intervals AS p USING (interval_id) JOIN mill.computations AS c USING (computation_id)
  JOIN mill.workers AS w USING (worker_id)
 WHERE e.kind = 'position' AND e.namespace = 'source'
"""
NOTES = """
SELECT c.name, p.interval_id, e.subkey, (e.value ->> 'offset')::bigint
  FROM mill.entries AS e JOIN mill.intervals AS p USING (interval_id) JOIN mill.computations AS c USING (computation_id)
 WHERE e.kind = 'position' AND e.namespace = 'notes'
"""


def content(path: Path) -> bytes:
    """Return the decompressed content of a file."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


class Inbox:
    """The directory, and the writer of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rng = random.Random(3)
        self._made = 0
        folder.mkdir()

    def _lines(self, count: int) -> bytes:
        lines = []
        for number in range(self._made, self._made + count):
            device, value = f"d{self._rng.randrange(DEVICES)}", self._rng.randrange(100, 1_000)
            lines.append(
                b'{"id":"r%06d","device":"%s","at":%d,"value":%d}\n' % (number, device.encode(), number, value)
            )
        self._made += count
        return b"".join(lines)

    def add(self, name: str, count: int) -> Path:
        """Another file, renamed into place."""
        lines = self._lines(count)
        hidden = self.folder / f".{name}"
        hidden.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
        return hidden.rename(self.folder / name)

    def grow(self, name: str, count: int) -> Path:
        """More of a file that is there."""
        with (self.folder / name).open("ab", buffering=0) as file:
            file.write(self._lines(count))
        return self.folder / name

    def sizes(self) -> dict[str, int]:
        """path -> bytes, decompressed."""
        return {str(path): len(content(path)) for path in self.folder.iterdir()}

    def values(self) -> dict[str, dict[str, int]]:
        """device -> id -> value, of all that is in the files."""
        found: dict[str, dict[str, int]] = defaultdict(dict)
        for path in self.folder.iterdir():
            for line in content(path).splitlines():
                reading = msgspec.json.decode(line)
                found[reading["device"]][reading["id"]] = reading["value"]
        return found


class Fleet:
    """Two workers, and others for those that were killed."""

    def __init__(self, folder: Path, url: str, inbox: Inbox, stack: ExitStack) -> None:
        self.inbox = inbox
        self._folder, self._url, self._stack = folder, url, stack
        self._connection = stack.enter_context(psycopg.connect(url, autocommit=True))
        self._connection.execute("SET jit = off")
        self.alive: list[Worker] = []
        for _ in range(2):
            self.start()

    def start(self) -> None:
        worker = Worker(self._folder, self._url, self.inbox.folder, graph=GRAPH, bundle_records_max=BUNDLE)
        self.alive.append(self._stack.enter_context(worker))

    def fetch(self, statement: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement).fetchall()

    def until(self, claim: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            assert all(worker.process.poll() is None for worker in self.alive), "a worker has ended"
            return claim()

        try:
            await_true(holds, what, 60)
        except AssertionError as error:
            state = self.fetch(POSITIONS), self.fetch(NOTES), [worker.log[-2000:] for worker in self.alive]
            raise AssertionError(f"{error}: {state}") from None

    def noted(self, source: str) -> dict[str, int]:
        """path -> bytes, of the files that a source has read to their end."""
        return {path: offset for name, _, path, offset in self.fetch(NOTES) if name == source}

    def kill_in_the_middle(self, source: str, supplies: Iterator[Path]) -> None:
        """SIGKILL a worker over a file; when all of that is read before anybody was caught, over the next one."""
        killed = False
        for path in supplies:
            begin, end = self.noted(source).get(str(path), 0), len(content(path))

            def caught(path: Path = path, begin: int = begin, end: int = end) -> bool:
                nonlocal killed
                killed = self._kill_over(source, path, begin, end)
                return killed or self.noted(source).get(str(path), 0) == end

            self.until(caught, f"somebody reads {path}")
            if killed:
                return
        raise AssertionError("every file was read before anybody could be killed over it")

    def _kill_over(self, source: str, path: Path, begin: int, end: int) -> bool:
        owner = self._owner_in_the_middle(source, path, begin, end)
        worker = next((worker for worker in self.alive if worker.process.pid == owner), None)
        if worker is None:
            return False  # it has no reader, or a dead reader that no worker has replaced yet
        # A frozen worker makes no progress while we check; what it sent before is less than the margin.
        worker.freeze()
        worker.await_frozen()
        if self._owner_in_the_middle(source, path, begin, end) != owner:
            worker.thaw()
            return False
        worker.kill()
        self.alive.remove(worker)
        return True

    def _owner_in_the_middle(self, source: str, path: Path, begin: int, end: int) -> int | None:
        """Return the process that reads a file halfway behind `begin`, after another file."""
        for name, interval, pid, at, offset in self.fetch(POSITIONS):
            if (name, at) == (source, str(path)) and begin < offset < end - MARGIN_BYTES:
                others = [note for note in self.fetch(NOTES) if note[1] == interval and note[2] != at]
                return pid if others else None
        return None

    def is_done(self) -> bool:
        """Tell whether all files are read and their records counted."""
        sizes = self.inbox.sizes()
        if any(self.noted(source) != sizes for source in SOURCES):
            return False
        return self.fetch("SELECT pending FROM millpy.accounting WHERE consumer IS NOT NULL") == [(0,)] * len(SOURCES)

    def growth(self, name: str) -> Iterator[Path]:
        """A file that grows whenever it is not being read."""
        for _ in range(20):
            self.until(self.is_done, "all is read that was there")
            yield self.inbox.grow(name, MANY)

    def drain(self) -> None:
        """The last one, which has done the rest."""
        (worker,) = self.alive
        worker.drain()
        worker.await_finished()

    def counted(self, source: str) -> dict[str, list[tuple[int, str, int]]]:
        """device -> number, id, total."""
        found: dict[str, list[tuple[int, str, int]]] = defaultdict(list)
        table = source.replace("in", "totals")
        for device, *row in self.fetch(f"SELECT device, number, id, total FROM inbox.{table} ORDER BY device, number"):
            found[device].append(tuple(row))
        return found


def test_every_record_counts_once_when_workers_die_in_the_middle_of_files(tmp_path: Path, database_url: str) -> None:
    # A worker that took over in the middle of a file once read the whole directory again.
    inbox = Inbox(tmp_path / "inbox")
    for name in SMALL:
        inbox.add(name, FEW)
    there = inbox.add("1-day.ndjson", MANY)
    days = chain([there], (inbox.add(f"2-day-{n}.ndjson", MANY) for n in range(20)))
    nights = (inbox.add(f"3-night-{n}.ndjson.gz", MANY) for n in range(20))

    with ExitStack() as stack:
        observer = stack.enter_context(Observer(database_url))
        fleet = Fleet(tmp_path, database_url, inbox, stack)
        fleet.kill_in_the_middle("in_1", days)
        fleet.start()
        fleet.kill_in_the_middle("in_3", nights)
        fleet.start()
        fleet.kill_in_the_middle("in_1", fleet.growth(SMALL[1]))
        fleet.until(fleet.is_done, "all is read")
        fleet.drain()

        expected = inbox.values()
        for source in SOURCES:
            found = fleet.counted(source)
            counts = {device: (len(rows), rows[-1][2]) for device, rows in found.items()}
            assert counts == {device: (len(of), sum(of.values())) for device, of in expected.items()}
            for device, rows in found.items():
                assert [number for number, _, _ in rows] == list(range(1, len(rows) + 1))
                assert sorted(id_ for _, id_, _ in rows) == sorted(expected[device])
        accepted = fleet.fetch(
            "SELECT sum(accepted)::int8 FROM millpy.accounting WHERE source_partition IS NOT NULL GROUP BY stream"
        )
        assert accepted == [(sum(map(len, expected.values())),)] * len(SOURCES)
        with psycopg.connect(database_url, autocommit=True) as connection:
            assert accounting_faults(connection) == []
        observer.look_now()
        assert observer.faults == []

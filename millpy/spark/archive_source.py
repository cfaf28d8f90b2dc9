"""An archive as the source of a stream that ends: its records in the order of their arrival, as if they came again.

A batch passes archived bundles on as they were (`archive_input`). Here the graph may be another one than the archived:
the records are decoded, deduplicated and judged anew, by its event time and its horizon.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millpy.errors import SourceUnavailableError, UsageError
from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.model.identity import Identity
from millpy.model.record import Instants
from millpy.model.time import INSTANT_MAX
from millpy.spark.archive_input import OPEN_FILES_MAX, ArchivedHistory, DecodedFile
from millpy.store.archive.parquet import EVENT_TIME, ORDINAL
from millpy.store.archive.reader import BundlePlace, bundles_of, partitions_of


class ArchivePosition(msgspec.Struct, frozen=True):
    """How far an archive was read: all bundles before `seq`, and of this one the records before place `ordinal`.

    Places stay as they are when an erasure leaves records out.
    """

    seq: int = 0
    ordinal: int = 0


class ArchivedSource(Source):
    """The archive of a source, in its place.

    Args:
        name: the source's name.
        live: the source.
        history: the archived files.
    """

    __slots__ = ("_history", "_live", "_name")

    def __init__(self, name: str, live: Source, history: ArchivedHistory) -> None:
        self._name = name
        self._live = live
        self._history = history

    def identity(self) -> Identity:
        """Describe the files, and the source that they are from."""
        return {"kind": "archive", "files": list(self._history.files), "of": self._live.identity()}

    def partitions(self) -> tuple[str, ...]:
        """Return the partitions of the live source."""
        return self._live.partitions()

    def check(self) -> None:
        """Check that the live source still has each archived partition.

        Raises:
            UsageError: it has not.
        """
        known = {f"{self._name}/{partition}" for partition in self.partitions()}
        if gone := sorted(partitions_of(self._history.files, self._name) - known):
            raise UsageError(
                f"the archive has records of {', '.join(gone)}, which source {self._name!r} does not read",
                hint="let the source have the partitions that it had; or name files: --input",
            )

    def ends(self) -> bool:
        """Return True: it ends with the last archived bundle."""
        return True

    def connect(self, setup: SourceSetup) -> ArchiveInjector:
        """Return the injector of one source partition, not yet open."""
        return ArchiveInjector(setup, self._history)


class ArchiveInjector:
    """The archived bundles of one source partition, each at most as large as a bundle may be now."""

    def __init__(self, setup: SourceSetup, history: ArchivedHistory) -> None:
        self._setup = setup
        self._history = history
        self._name = f"{setup.stream}/{setup.partition}"
        self._opened = lru_cache(OPEN_FILES_MAX)(partial(DecodedFile, self._name))
        self._places: deque[BundlePlace] = deque()
        self._at = ArchivePosition()
        self._ended = False
        self._total = 0

    async def open(self, position: bytes | None) -> None:
        """Go to a stored position.

        Raises:
            SourceUnavailableError: a file is gone.
        """
        self._at = ArchivePosition() if position is None else msgspec.json.decode(position, type=ArchivePosition)
        last = self._history.through.get(self._name, INSTANT_MAX)
        with _files_there():
            places = bundles_of(self._history.files, self._name)
        self._places = deque(place for place in places if self._at.seq <= place.seq <= last)

    async def take(self) -> SourceBatch | None:
        """Return records of one archived bundle; after the last, the end.

        Raises:
            SourceUnavailableError: a file is gone.
        """
        if self._ended:
            return None
        rows, arrived = _NO_ROWS, np.empty(0, np.int64)
        while self._places and not len(rows):
            place = self._places[0]
            begin = self._at.ordinal if place.seq == self._at.seq else 0
            left, times, ordinals = self._rows(place, begin)
            rows = _bounded(left, self._setup.take_bound.records, self._setup.take_bound.bytes)
            arrived = times[: len(rows)]
            self._at = ArchivePosition(place.seq, int(ordinals[len(rows) - 1]) + 1 if len(rows) else begin)
            if len(rows) == len(left):
                self._places.popleft()
        self._ended = not self._places
        self._total += len(rows)
        seq = self._at.seq
        return SourceBatch(
            format="columns",
            arrived_at=self._setup.clock.now_us(),
            batch=rows if len(rows) else None,
            arrivals=lambda: arrived,
            describe=lambda row: f"{self._name} in bundle {seq}, record {row}",
            position=msgspec.json.encode(self._at),
            finished=self._ended,
            records=len(rows),
            total=self._total,
        )

    def _rows(self, place: BundlePlace, begin: int) -> tuple[pa.RecordBatch, Instants, npt.NDArray[np.int32]]:
        """Return the fields of a bundle's records in the time range from a place on, their event times and places.

        A field that was added later is missing.
        """
        with _files_there():
            table = self._history.inside(self._opened(place.file).bundle(place.seq))
        table = table.slice(np.searchsorted(table[ORDINAL].to_numpy(), begin))
        assert self._setup.record_type is not None
        times, ordinals = table[EVENT_TIME].to_numpy().astype(np.int64), table[ORDINAL].to_numpy()
        known = [name for name in self._setup.record_type.fields if name in table.column_names]
        table = table.select(known).combine_chunks()
        batch = pa.RecordBatch.from_arrays(
            [column.combine_chunks() if len(table) else pa.array([], column.type) for column in table.columns],
            names=known,
        )
        return batch, times, ordinals

    async def acknowledge(self, token: Any) -> None:
        """Do nothing: we keep the position."""

    def quiet(self) -> bool:
        """Tell whether everything has been read."""
        return self._ended

    async def close(self) -> None:
        """Let go of the files."""
        self._opened.cache_clear()


@contextmanager
def _files_there() -> Iterator[None]:
    """Say what to do when the archiver has merged or deleted a file."""
    try:
        yield
    except FileNotFoundError as error:
        raise SourceUnavailableError(
            f"a file of the archive is gone, as it was merged with others or too old: {error}",
            hint="start the backfill again: it finds the files anew, and continues",
        ) from None


_NO_ROWS = pa.RecordBatch.from_arrays([], names=[])


def _bounded(rows: pa.RecordBatch, records_max: int, bytes_max: int) -> pa.RecordBatch:
    """Return at least one of the rows, and not many more than fit: by their size on average."""
    if not len(rows):
        return rows
    fitting = len(rows) * bytes_max // max(1, rows.nbytes)
    return rows.slice(0, max(1, min(records_max, fitting)))

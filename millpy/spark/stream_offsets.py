"""What a batch has taken from sources whose records are asked for by position, so that a repeated batch takes the same.

    CHECKPOINT/offsets/BATCH-INTERVAL.json

A source task writes the file before it ends, so before a stage can have seen its records. The first attempt that comes
to its end decides: each later one, of this driver or the next, takes exactly that, and fails if it is not there.
"""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import msgspec

from millpy.errors import CorruptionError
from millpy.spark.stream_state import write_durably
from millpy.store.archive.local_storage import sync_directory


class TakenRange(msgspec.Struct, frozen=True):
    """What a batch has taken from a source partition.

    Attributes:
        after: the position behind it; of a partition without one, None.
        records: the number of its records.
        quiet: whether the source had nothing more.
    """

    after: int | None
    records: int
    quiet: bool


class OffsetLog:
    """The ranges of the batches that are not committed; every machine sees the directory under the same name."""

    def __init__(self, checkpoint: Path) -> None:
        self._path = checkpoint / "offsets"

    def create(self) -> None:
        """Make the directory if it does not exist."""
        self._path.mkdir(parents=True, exist_ok=True)

    def read(self, batch: int, interval_id: int) -> TakenRange | None:
        """Return what an attempt that came to its end has taken; None if there was none."""
        try:
            content = self._name(batch, interval_id).read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(content, type=TakenRange)

    def decide(self, batch: int, interval_id: int, taken: TakenRange) -> None:
        """Write what this attempt has taken.

        Raises:
            CorruptionError: another attempt has taken something else meanwhile.
        """
        ready = self._path / f"{uuid4().hex}.tmp"
        write_durably(ready, msgspec.json.encode(taken))
        try:
            os.link(ready, self._name(batch, interval_id))
            sync_directory(self._path)
        except FileExistsError:
            if self.read(batch, interval_id) != taken:
                raise CorruptionError(
                    f"another attempt of batch {batch} has read interval {interval_id} meanwhile",
                    hint="nothing is lost: Spark repeats this attempt, which then reads the same",
                ) from None
        finally:
            ready.unlink(missing_ok=True)  # a commit without this attempt sweeps it

    def sweep(self, batch: int) -> None:
        """Delete the ranges of the batches up to a committed one, and what is left of killed attempts."""
        for path in self._path.iterdir():
            number = path.stem.partition("-")[0]
            if path.suffix == ".tmp" or int(number) <= batch:
                path.unlink(missing_ok=True)

    def _name(self, batch: int, interval_id: int) -> Path:
        return self._path / f"{batch:010}-{interval_id}.json"

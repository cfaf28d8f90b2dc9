"""Reads one file after the other in a thread: what is next, where to begin, what a defect means."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from millpy.errors import BrokenFileError, SourceUnavailableError
from millpy.injectors.files_agenda import Agenda, Next, Notes
from millpy.injectors.files_bytes import FilePosition, StoppedError, check_same, recognize
from millpy.injectors.files_lines import Format, LineReader, Piece
from millpy.injectors.files_parquet import ParquetReader
from millpy.injectors.protocol import Refused, TakeBound
from millpy.limits import Limits

BROKEN = "broken_file"
Broken = Literal["stop", "set_aside"]


def format_of(path: str) -> Format:
    """What a file's name says, in either case: .csv, .parquet or .pq, else NDJSON; before a possible .gz."""
    ending = Path(path.lower().removesuffix(".gz")).suffix
    return {".csv": "csv", ".parquet": "parquet", ".pq": "parquet"}.get(ending, "json")  # type: ignore[return-value]


class Reading:
    """Blocking reader of a source partition.

    Args:
        format: of all files; by default what each name says.
        broken: what a defect does.
        fields: the columns that are wanted.
    """

    def __init__(
        self,
        agenda: Agenda,
        notes: Notes,
        *,
        format: Format | None,
        broken: Broken,
        fields: tuple[str, ...],
        limits: Limits,
        bound: TakeBound | None = None,
    ) -> None:
        self._agenda = agenda
        self._notes = notes
        self._format = format
        self._broken = broken
        self._fields = fields
        self._limits = limits
        self._bound = bound
        self._opened: BinaryIO | None = None
        self._file: LineReader | ParquetReader | None = None
        self._size = 0  # of the open file, when it was opened
        self._stopping = threading.Event()
        self._resume: FilePosition | None = None
        self._at = FilePosition("")
        self._pending: dict[str, bytes | None] = {}

    def open(self, position: bytes | None) -> None:
        """Take a stored position; going there is left to `read`, because it may take long.

        Raises:
            ConfigError: a file is missing.
            BrokenFileError: the file at the position is not the one that was read.
            SourceUnavailableError: it cannot be read.
        """
        self._agenda.check()
        if position is None:
            return
        self._at = msgspec.json.decode(position, type=FilePosition)
        done = self._notes.done.get(self._at.path)
        if self._at.path and (done is None or self._at.offset > done.offset):  # else it had been read to its end
            self._resume = self._at
            if self._broken == "stop":
                with self._agenda.open(self._at.path) as opened:
                    check_same(self._at, opened)

    def stop(self) -> None:
        """End a `read` in another thread, soon."""
        self._stopping.set()

    def close(self) -> None:
        """Close the file."""
        self._file = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def is_waiting(self) -> bool:
        """Whether a file has to settle first."""
        return self._agenda.is_waiting()

    def read(self) -> Piece | None:
        """The next piece; None when there is nothing now.

        Raises:
            BrokenFileError: a defect that stops the source.
            SourceUnavailableError: it cannot be read now.
            StoppedError: after `stop`.
        """
        while not self._stopping.is_set():
            begun = self._at
            try:
                if self._file is None:
                    following = Next(self._resume) if self._resume is not None else self._agenda.next()
                    if following is None:
                        return Piece(self._at, finished=True) if self._agenda.is_over() else None
                    begun = following.position
                    self._begin(following)
                assert self._file is not None
                begun = self._file.at
                piece = self._file.read()
            except BrokenFileError as error:
                if self._broken == "stop":
                    raise
                return self._set_aside(error, begun)
            except SourceUnavailableError:
                # What the reader had in its hands is gone with the error: begin anew behind what was handed over.
                if self._file is not None:
                    self._resume = self._file.at
                self.close()
                raise
            self._at = piece.after
            if piece.ended:
                self._finish(piece)
            if piece.block or piece.payloads or piece.batch is not None or piece.ended:
                piece.notes = {**self._pending, **piece.notes}
                self._pending = {}
                return piece
        raise StoppedError

    def _begin(self, following: Next) -> None:
        position = following.position
        self._size = position.size
        if following.problem:
            raise BrokenFileError(following.problem, hint="give new data a new name")
        self._opened = opened = self._agenda.open(position.path)
        if position.offset:
            check_same(position, opened)
        head, head_bytes, self._size = recognize(position.path, opened)
        position = msgspec.structs.replace(position, head=head, head_bytes=head_bytes)
        kind = self._format or format_of(position.path)
        if kind == "parquet":
            self._file = ParquetReader(position, opened, self._fields, self._limits, self._bound)
        else:
            self._file = LineReader(position, opened, kind, self._limits, self._stopping, self._bound)
        self._resume = None
        self._pending.update(self._agenda.changed_notes())

    def _finish(self, piece: Piece) -> None:
        """Note that a file has been read to its end."""
        changed_ns = 0 if self._opened is None else _changed_ns(self._opened)
        self.close()
        path = piece.after.path
        # What has been read of a plain file counts, in case somebody appends to it at this moment.
        plain = piece.format != "columns" and not path.lower().endswith(".gz")
        size = piece.after.offset if plain else self._size
        piece.notes = self._notes.finish(msgspec.structs.replace(piece.after, size=size, changed_ns=changed_ns))
        piece.finished = self._agenda.is_over()

    def _set_aside(self, error: BrokenFileError, begun: FilePosition) -> Piece:
        """The rest of a broken file as one dead letter."""
        rest = self._file.rest() if self._file is not None else b""
        at = self._file.at if self._file is not None else begun
        # What was opened counts: a whole file may have taken its place since, and is to be read on.
        changed_ns = begun.changed_ns if self._opened is None else _changed_ns(self._opened)
        self.close()
        self._resume = None
        if not self._size:
            self._size, changed_ns = _size_of(at.path)
        self._at = msgspec.structs.replace(at, size=self._size, broken=True, changed_ns=changed_ns)
        place = f"{at.path}:{at.line + 1} (byte {at.offset})"
        notes = {**self._pending, **self._notes.finish(self._at)}
        self._pending = {}
        return Piece(
            self._at,
            lambda _: place,
            payloads=[rest],
            refused=(Refused(0, BROKEN, error.message),),
            notes=notes,
            finished=self._agenda.is_over(),
            records=1,
        )


def _changed_ns(opened: BinaryIO) -> int:
    return os.fstat(opened.fileno()).st_mtime_ns


def _size_of(path: str) -> tuple[int, int]:
    """Size and time of change of a file that could not be opened; zeros when there is none."""
    try:
        state = Path(path).lstat()
    except OSError:
        return 0, 0
    return state.st_size, state.st_mtime_ns

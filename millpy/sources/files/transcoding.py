"""Text of UTF-16 and UTF-32 as UTF-8, while a file is read by pieces.

Lines are found by the byte of a newline, which wide text does not have alone. So positions in such a file count the
bytes of its UTF-8, as those in a gzip file count the decompressed bytes; to reach one, the file is read from its
beginning.
"""

from __future__ import annotations

import codecs

from millpy.errors import BrokenFileError
from millpy.formats.byte_order_marks import MARK_BYTES_MAX, UTF_8, wide_mark
from millpy.sources.files.byte_reader import Bytes

_PASSED_BYTES = 1_000_000
_ENDIAN = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}
"""What text without a mark is in, as Windows writes it."""


class Utf8Reader:
    """Reads wide text as UTF-8 with its mark; a file that begins with the mark of UTF-8 is returned as it is.

    All text before a defect is returned before the defect is raised.

    Args:
        path: the file, for messages.
        wide: reads its bytes.
        encoding: the name of the codec.

    Attributes:
        taken: the bytes of the file that were read.
    """

    def __init__(self, path: str, wide: Bytes, encoding: str) -> None:
        self.taken = 0
        self._path = path
        self._wide = wide
        self._encoding = _ENDIAN.get(encoding, encoding)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._is_begun = False
        self._mark = UTF_8
        self._kept = b""  # returned by the next read
        self._defect: BrokenFileError | None = None

    def read(self, count: int) -> bytes:
        """Return about `count` bytes; empty at the end. Raises BrokenFileError, SourceUnavailableError."""
        found, self._kept = self._kept, b""
        while not found and self._defect is None:
            piece = self._more(count) if self._is_begun else self._begin(count)
            found = piece if self._decoder is None else self._utf_8(self._decoder, piece)
            if not piece:
                break
        if not found and self._defect is not None:
            raise self._defect
        return found

    def _more(self, count: int) -> bytes:
        piece = self._wide.read(count)
        self.taken += len(piece)
        return piece

    def pass_over(self, count: int) -> int:
        """Skip `count` bytes; return how many there were."""
        passed = 0
        while passed < count and (piece := self.read(_PASSED_BYTES)):
            self._kept = piece[count - passed :]
            passed += len(piece) - len(self._kept)
        return passed

    def _begin(self, count: int) -> bytes:
        """Return the first bytes without a wide mark, and choose their decoder. Raises BrokenFileError."""
        piece = b""
        while len(piece) < MARK_BYTES_MAX and (more := self._more(count)):
            piece += more
        self._is_begun = True
        if piece.startswith(UTF_8):
            return piece
        found = wide_mark(piece)
        if found is not None and not self._encoding.startswith(found.name.lower()):
            raise BrokenFileError(
                f"{self._path} is {found.name}, by its byte order mark, and not {self._encoding}",
                hint=f"set {found.setting} in its format",
            )
        if found is not None:
            self._encoding = found.codec
            piece = piece[len(found.mark) :]
        self._decoder = codecs.getincrementaldecoder(self._encoding)()
        return piece

    def _utf_8(self, decoder: codecs.IncrementalDecoder, piece: bytes) -> bytes:
        """Return the UTF-8 of a piece; of one with a defect, that of the text before it."""
        try:
            text = decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            text = error.object[: error.start].decode(self._encoding)
            self._defect = BrokenFileError(
                f"{self._path} is not {self._encoding}: {error.reason}",
                hint="replace the file, or set the encoding that it has; its beginning has been read",
            )
        if not text:
            return b""
        mark, self._mark = self._mark, b""
        return mark + text.encode()

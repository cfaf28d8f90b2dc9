"""Byte order marks: what the first bytes of a text say about its encoding (Unicode, section 23.8).

The mark of UTF-8 is passed over, in JSON as in CSV. Text of UTF-16 and UTF-32 needs the setting `encoding=`, which only
`Csv` has, and is refused without it.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

UTF_8 = codecs.BOM_UTF8
MARK_BYTES_MAX = 4


@dataclass(frozen=True, slots=True)
class ByteOrderMark:
    """A mark of an encoding in which a character has at least two bytes.

    Attributes:
        mark: its bytes.
        codec: the name of the codec for what is behind it.
        name: the encoding, for messages.
    """

    mark: bytes
    codec: str
    name: str

    @property
    def setting(self) -> str:
        """The setting that reads such text."""
        return f'encoding="{self.name.lower()}"'


_WIDE = (
    ByteOrderMark(codecs.BOM_UTF32_LE, "utf-32-le", "UTF-32"),  # begins with the mark of UTF-16
    ByteOrderMark(codecs.BOM_UTF32_BE, "utf-32-be", "UTF-32"),
    ByteOrderMark(codecs.BOM_UTF16_LE, "utf-16-le", "UTF-16"),
    ByteOrderMark(codecs.BOM_UTF16_BE, "utf-16-be", "UTF-16"),
)


def wide_mark(data: bytes) -> ByteOrderMark | None:
    """Return the mark of UTF-16 or UTF-32 at the beginning of a text."""
    if data[:1] not in (b"\xff", b"\xfe", b"\0"):
        return None
    return next((wide for wide in _WIDE if data.startswith(wide.mark)), None)


def without_mark(data: bytes) -> bytes:
    """Return text in UTF-8 without its mark. Raises ValueError for text that begins with another mark."""
    wide = wide_mark(data)
    if wide is not None:
        raise ValueError(f"it is {wide.name}, by its byte order mark: convert it to UTF-8")
    return data.removeprefix(UTF_8)


def is_wide(encoding: str) -> bool:
    """Tell whether an encoding, by the name of its codec, is UTF-16 or UTF-32, where a newline is several bytes."""
    return encoding.startswith(("utf-16", "utf-32"))


def decoded(data: bytes, encoding: str) -> tuple[str, str]:
    """Return the text of bytes without its mark, and the encoding in which parts of it are written.

    What begins with the mark of UTF-8 is UTF-8, and parts of wide text are written in UTF-8.

    Args:
        data: the bytes.
        encoding: the name of their codec, if no mark says otherwise.

    Raises:
        ValueError: they are not in the encoding, or begin with the mark of another one.
    """
    if data.startswith(UTF_8):
        return data[len(UTF_8) :].decode(), "utf-8"
    wide = wide_mark(data)
    if wide is None:
        return data.decode(encoding), "utf-8" if is_wide(encoding) else encoding
    if not encoding.startswith(wide.name.lower()):
        raise ValueError(f"it is {wide.name}, by its byte order mark: set {wide.setting}, or convert it to UTF-8")
    return data[len(wide.mark) :].decode(wide.codec), "utf-8"

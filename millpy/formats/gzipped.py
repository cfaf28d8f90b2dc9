"""Compressed payloads."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from millpy.errors import GraphError
from millpy.formats.message import Format, Message, Part, Reader
from millpy.model.identity import Identity
from millpy.model.record import RecordType

EXPANDED_BYTES_MAX = 4_000_000
"""The most bytes of one message after it is decompressed."""
MEMBERS_MAX = 100
"""The most members of one message, each of which is compressed by itself (RFC 1952)."""
_ANY_HEADER = 32 + 15  # gzip or zlib, as the bytes say
_BARE = -15


@dataclass(frozen=True, slots=True, repr=False)
class Gzip(Format):
    """A payload compressed by gzip or zlib, of at most 4 MB when expanded: `Gzip(Json(many="readings"))`.

    A payload that is not compressed is a dead letter. One may have up to 100 members, as appended files have.

    Args:
        format: the format of the payload inside.
    """

    format: Format

    def __post_init__(self) -> None:
        if not isinstance(self.format, Format) or isinstance(self.format, Gzip):
            raise GraphError(f"Gzip({self.format!r}): name the format inside", hint="for example Gzip(Json())")

    @property
    def reads_lines(self) -> bool:
        """A line of a file is no message; files ending in .gz are decompressed without this."""
        return False

    @property
    def filled_names(self) -> Sequence[str]:
        """Those of the format inside."""
        return self.format.filled_names

    def identity(self) -> Identity:
        """Describe the format inside."""
        return {"kind": "gzip", "format": self.format.identity()}

    def validate(self, record_type: RecordType) -> None:
        """Check the format inside. Raises GraphError."""
        self.format.validate(record_type)

    def reader(self, record_type: RecordType) -> Reader:
        """Return a function that decompresses a message and reads it."""
        inside = self.format.reader(record_type)

        def read(message: Message) -> Iterable[Part]:
            # A bad row has the header of its message, up to 64 kB: thousands of them are not compressed, only packed.
            return (
                part if isinstance(part, bytes) else replace(part, payload=zlib.compress(part.payload, 0, wbits=31))
                for part in inside(msgspec.structs.replace(message, payload=expanded(message.payload)))
            )

        return read


def expanded(payload: bytes, *, may_be_bare: bool = False) -> bytes:
    """Decompress a payload, also one of deflate without a header if `may_be_bare`.

    Raises:
        ValueError: it is damaged, or too large.
    """
    found = b""
    form = _BARE if may_be_bare and not _has_header(payload) else _ANY_HEADER
    for _ in range(MEMBERS_MAX):
        machine = zlib.decompressobj(form)
        try:
            found += machine.decompress(payload, EXPANDED_BYTES_MAX + 1 - len(found))
        except zlib.error as error:
            raise ValueError(f"{'not deflate' if form == _BARE else 'neither gzip nor zlib'}: {error}") from error
        if len(found) > EXPANDED_BYTES_MAX:
            raise ValueError(f"expands to more than {EXPANDED_BYTES_MAX} bytes")
        if not machine.eof:
            raise ValueError("the compressed payload is cut off")
        payload = machine.unused_data.lstrip(b"\0")  # zeros may pad the end
        if not payload:
            return found
    raise ValueError(f"has more than {MEMBERS_MAX} members")


def _has_header(payload: bytes) -> bool:
    """Tell whether a payload begins as gzip or zlib does (RFC 1950: method 8, and a multiple of 31)."""
    begin = payload[:2]
    return begin == b"\x1f\x8b" or (len(begin) == 2 and begin[0] & 15 == 8 and int.from_bytes(begin) % 31 == 0)

"""Bounds on the decompressed size of a Kafka batch and on the headers of a record.

The limits of a fetch count compressed bytes, and 16 kB of zstd can become a gigabyte. So we decompress batches
ourselves, up to a bound, before aiokafka parses them; of the old formats, which have no headers, aiokafka decompresses
batches by functions of its modules, which are replaced with ours. And aiokafka creates an object for each header of a
record, which may have only two bytes: a compressed batch with too many bytes of headers in a record is rejected before
that.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pyarrow as pa
from aiokafka.errors import KafkaError
from aiokafka.record import legacy_records
from aiokafka.record.util import decode_varint

EXPANDED_BYTES_MAX = 64_000_000
HEADERS_BYTES_MAX = 64_000
"""The most bytes of the headers of one record."""
CODECS = {1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_AFTER_LENGTH, _ATTRIBUTES_END, _RECORDS_AT = 12, 23, 61
"""Places in the header of a batch."""
_CODEC = 7
_PIECE_BYTES = 1_000_000
_XERIAL = b"\x82SNAPPY\x00"
_XERIAL_BYTES = 16
_SNAPPY_RATIO_MAX = 32
"""The highest ratio of decompressed to compressed bytes; real data reaches about 22."""
_SMALL_BYTES = 1_000_000
"""Records of fewer bytes cannot hold a harmful number of headers."""


class ExpansionError(KafkaError):  # type: ignore[misc]
    """A batch is too large when decompressed, or does not match its compression."""


def bound_legacy_expansion() -> None:
    """Make aiokafka decompress batches of the old formats within the bound. Idempotent."""
    modules: list[Any] = [legacy_records]
    with suppress(ImportError):  # built without extensions
        from aiokafka.record._crecords import legacy_records as compiled

        modules.append(compiled)
    for module in modules:
        for codec in CODECS.values():
            if hasattr(module, name := f"{codec}_decode"):
                setattr(module, name, partial(_decode_legacy, codec))


def without_compression(batch: bytes, codec: str) -> bytes:
    """Return a batch of the current format with its records decompressed. Its checksum is no longer right.

    Raises:
        ExpansionError: the batch exceeds the bound or does not match the codec, or a record has too many headers.
    """
    records = expanded(codec, batch[_RECORDS_AT:])
    if len(records) > _SMALL_BYTES and _has_too_long_headers(records):
        raise ExpansionError(f"a record has more than {HEADERS_BYTES_MAX} bytes of headers")
    length, attributes = len(records) + _RECORDS_AT - _AFTER_LENGTH, batch[_ATTRIBUTES_END - 1] & ~_CODEC
    return b"".join([
        batch[:8], struct.pack(">i", length), batch[_AFTER_LENGTH : _ATTRIBUTES_END - 1], bytes([attributes]),
        batch[_ATTRIBUTES_END:_RECORDS_AT], records,
    ])  # fmt: skip


def expanded(codec: str, payload: bytes) -> bytes:
    """Decompress the payload of a batch.

    Args:
        codec: one of `CODECS`.
        payload: the compressed bytes of the batch.

    Raises:
        ExpansionError: the payload exceeds the bound, or does not match the codec.
    """
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in _snappy(payload) if codec == "snappy" else _streamed(codec, payload):
            pieces.append(piece)
            size += len(piece)
            if size > EXPANDED_BYTES_MAX:
                raise ExpansionError(
                    f"a batch of {len(payload)} bytes ({codec}) expands to more than {EXPANDED_BYTES_MAX} bytes"
                )
    except (pa.ArrowException, OSError, ValueError, IndexError, struct.error) as error:
        raise ExpansionError(f"a batch of {len(payload)} bytes is not valid {codec}: {error}") from error
    return b"".join(pieces)


def too_long_headers(records: bytes, place: int, end: int) -> bool:
    """Tell whether the headers of a record exceed the bound; the record's length is in front of `place`.

    Raises:
        IndexError: the bytes are not a record.
        ValueError: the bytes are not a record.
    """
    place += 1  # attributes
    for _ in range(2):  # time, offset
        _, place = decode_varint(records, place)
    for _ in range(2):  # key, value
        length, place = decode_varint(records, place)
        place += max(0, length)
    return end - place > HEADERS_BYTES_MAX


def _decode_legacy(codec: str, payload: Any) -> bytes:
    return expanded(codec, bytes(payload))


def _streamed(codec: str, payload: bytes) -> Iterator[bytes]:
    with pa.input_stream(pa.py_buffer(payload), compression=codec) as stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece


def _snappy(payload: bytes) -> Iterator[bytes]:
    """Yield decompressed blocks of snappy; each block claims a size, which is not trusted."""
    if not payload.startswith(_XERIAL):
        yield _snappy_block(payload)
        return
    place = _XERIAL_BYTES
    while place < len(payload):
        (length,) = struct.unpack_from(">i", payload, place)
        if not 0 < length <= len(payload) - place - 4:
            raise ValueError(f"a block claims {length} bytes")
        yield _snappy_block(payload[place + 4 : place + 4 + length])
        place += 4 + length


def _snappy_block(block: bytes) -> bytes:
    size = shift = 0
    for byte in block[:5]:
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    if size > min(EXPANDED_BYTES_MAX, _SNAPPY_RATIO_MAX * len(block)):
        raise ExpansionError(f"a block of {len(block)} bytes (snappy) claims to expand to {size} bytes")
    return bytes(pa.decompress(block, decompressed_size=size, codec="snappy"))


def _has_too_long_headers(records: bytes) -> bool:
    """Tell whether a record of a batch has too long headers; parse only the long records."""
    place, end = 0, len(records)
    try:
        while place < end:
            byte = records[place]
            if byte < 0x80:
                place += 1 + (byte >> 1)
                continue
            length, place = decode_varint(records, place)
            if length > HEADERS_BYTES_MAX and too_long_headers(records, place, place + length):
                return True
            if length < 0:
                return False
            place += length
    except (IndexError, ValueError):
        pass  # reading the records will report it
    return False

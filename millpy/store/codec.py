"""The slice codec: records as the bytes of one slice of a segment.

    frame     version, flags, counts and lengths (`_FRAME`)
    times     event times int64[records], then watermarks, if there are any, either as plain int64[records] or as
              runs: values int64[runs], ends int32[runs]; then which records are retractions, if any is, one bit each;
              lz4 when that pays
    sites     the progress of sites, as JSON; only in slices of a source with watermarks by site
    batch     an Arrow IPC record batch message with lz4 buffers, without the schema message. The reader takes the
              schema from the deployed stream, to which fields are only appended, and the number of fields at the
              time of writing from the frame

Everything is little-endian. The checksum of a slice is its xxh3_64 as a signed 64-bit number, because that is what a
bigint holds. The watermarks of neighboring rows repeat while events are out of order, so runs are usually shorter.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from millpy.errors import SegmentChecksumError
from millpy.model.checkpoint import StoredSlice
from millpy.model.record import Instants, Records, RecordType
from millpy.model.sites import decode_progress

_VERSION = 1
_HAS_WATERMARKS = 1
_WATERMARK_RUNS = 2
_TIMES_COMPRESSED = 4
_HAS_RETRACTIONS = 8
# Version, flags, fields, records, runs, bytes of times as stored and when decompressed, bytes of sites.
_FRAME = struct.Struct("<BBHIIIII")
_COMPRESS_BYTES_MIN = 2_048
"""Below this size, lz4 framing costs more than it saves."""
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


def checksum_of(payload: bytes | memoryview) -> int:
    """Return the xxh3_64 of a payload as a signed 64-bit integer."""
    digest = xxhash.xxh3_64_intdigest(payload)
    return digest - 2**64 if digest >= 2**63 else digest


def encode_slice(records: Records) -> StoredSlice:
    """Encode records, with their event times and watermarks, as one slice.

    Cost:
        Under 0.1 ms and a few hundred bytes for one record; about 5 ms for 65,536.
    """
    times, flags, runs = _encode_times(records)
    stored = times
    if len(times) >= _COMPRESS_BYTES_MIN:
        stored = pa.compress(times, codec="lz4", asbytes=True)
        flags |= _TIMES_COMPRESSED
    fields = len(records.type.fields)
    sites = b"" if records.sites is None else records.sites.encode()
    frame = _FRAME.pack(_VERSION, flags, fields, len(records), runs, len(stored), len(times), len(sites))
    padding = bytes(-(len(stored) + len(sites)) % 8)  # Arrow reads from a multiple of 8
    payload = b"".join((frame, stored, sites, padding, _encode_batch(records.batch())))
    return StoredSlice(len(records), payload, checksum_of(payload))


def decode_slice(record_type: RecordType, payload: bytes, checksum: int) -> Records:
    """Decode the records of one slice. The payload is not copied where Arrow can refer to it.

    Raises:
        SegmentChecksumError: the bytes have changed since they were written.
    """
    _check_written(payload, checksum)
    try:
        return _decoded(record_type, payload)
    except (pa.ArrowException, EOFError, MemoryError, OSError, OverflowError, ValueError, struct.error) as error:
        raise SegmentChecksumError(
            f"a slice of {len(payload)} bytes has the right checksum but cannot be decoded: {error}",
            hint="another program wrote it: keep everything, and restore from a backup",
        ) from error


def _decoded(record_type: RecordType, payload: bytes) -> Records:
    """Decode the bytes of a slice. Malformed bytes raise one of the errors that `decode_slice` catches."""
    version, flags, fields, count, runs, stored_length, times_length, sites_length = _FRAME.unpack_from(payload)
    schema = record_type.schema
    before_batch = stored_length + sites_length
    start = _FRAME.size + before_batch + -before_batch % 8
    if version != _VERSION or start > len(payload) or fields > len(schema):
        # The fence keeps this worker from reading slices of a newer version of the graph.
        raise ValueError(f"version {version}, {fields} fields, {stored_length} bytes of times")
    if times_length != _times_length(count, flags, runs):
        raise ValueError(f"{times_length} bytes of times for {count} records in {runs} runs")
    times: bytes = payload[_FRAME.size : _FRAME.size + stored_length]
    if flags & _TIMES_COMPRESSED:
        times = pa.decompress(times, decompressed_size=times_length, codec="lz4", asbytes=True)
    event_times, watermarks = _decode_times(times, count, flags, runs)
    retracts = None
    if flags & _HAS_RETRACTIONS:
        bits = np.frombuffer(times, np.uint8, -(-count // 8), offset=times_length - -(-count // 8))
        retracts = np.unpackbits(bits, count=count).astype(np.bool_)
    written = schema if fields == len(schema) else pa.schema([schema.field(place) for place in range(fields)])
    batch = pa.ipc.read_record_batch(pa.py_buffer(payload).slice(start), written)
    if len(batch) != count:
        raise ValueError(f"{len(batch)} rows for {count} records")
    batch.validate(full=True)  # reading does not check lengths and offsets
    if fields < len(schema):
        batch = record_type.with_defaults(batch)
    records = Records(record_type, event_times, watermarks=watermarks, retracts=retracts, batch=batch)
    if sites_length:
        at = _FRAME.size + stored_length
        records.sites = decode_progress(payload[at : at + sites_length])
    return records


def without_fields(piece: StoredSlice, schema: pa.Schema, kept: int) -> StoredSlice:
    """Return a slice with only the first `kept` of its columns. `schema` begins with the columns of the slice.

    Raises:
        SegmentChecksumError: the bytes have changed since they were written.
    """
    if not piece.payload:
        return piece
    payload = piece.payload
    _check_written(payload, piece.checksum)
    version, flags, fields, count, runs, stored_length, times_length, sites_length = _FRAME.unpack_from(payload)
    if fields <= kept:
        return piece
    before_batch = stored_length + sites_length
    start = _FRAME.size + before_batch + -before_batch % 8
    written = pa.schema([schema.field(place) for place in range(fields)])
    batch = pa.ipc.read_record_batch(pa.py_buffer(payload).slice(start), written).select(list(range(kept)))
    frame = _FRAME.pack(version, flags, kept, count, runs, stored_length, times_length, sites_length)
    shorter = b"".join((frame, payload[_FRAME.size : start], _encode_batch(batch)))
    return StoredSlice(count, shorter, checksum_of(shorter))


def _check_written(payload: bytes, checksum: int) -> None:
    """Raise SegmentChecksumError when the bytes have changed since they were written."""
    found = checksum_of(payload)
    if found != checksum:
        raise SegmentChecksumError(
            f"a slice of {len(payload)} bytes has checksum {found}, but was written with {checksum}",
            hint="the storage below PostgreSQL may be damaged: keep everything, and restore from a backup",
        )


def _times_length(count: int, flags: int, runs: int) -> int:
    """Return the number of bytes of the times before compression."""
    retractions = -(-count // 8) if flags & _HAS_RETRACTIONS else 0
    if not flags & _HAS_WATERMARKS:
        return 8 * count + retractions
    return 8 * count + (12 * runs if flags & _WATERMARK_RUNS else 8 * count) + retractions


def _encode_times(records: Records) -> tuple[bytes, int, int]:
    """Encode the event times, watermarks and retractions. Return the bytes, their flags and the number of runs."""
    times, flags, runs = _encode_watermarks(records)
    if records.retracts is not None and records.retracts.any():
        return times + np.packbits(records.retracts).tobytes(), flags | _HAS_RETRACTIONS, runs
    return times, flags, runs


def _encode_watermarks(records: Records) -> tuple[bytes, int, int]:
    """Encode the event times and watermarks. Return the bytes, their flags and the number of runs."""
    event_times = records.event_times.astype("<i8", copy=False).tobytes()
    watermarks = records.watermarks
    if watermarks is None:
        return event_times, 0, 0
    if len(watermarks) == 1:
        return event_times + watermarks.astype("<i8", copy=False).tobytes(), _HAS_WATERMARKS, 0
    values, ends = _runs(watermarks)
    if len(values) * 12 >= len(watermarks) * 8:
        return event_times + watermarks.astype("<i8", copy=False).tobytes(), _HAS_WATERMARKS, 0
    return event_times + values.tobytes() + ends.tobytes(), _HAS_WATERMARKS | _WATERMARK_RUNS, len(values)


def _runs(values: Instants) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Encode values as runs. Return the value and the end (exclusive) of each run."""
    ends = np.append(np.flatnonzero(values[1:] != values[:-1]) + 1, len(values))[: len(values)]
    return values[ends - 1].astype("<i8", copy=False), ends.astype("<i4")


def _decode_times(times: bytes, count: int, flags: int, runs: int) -> tuple[Instants, Instants | None]:
    """Decode the event times and watermarks of `count` records; None for records without watermarks.

    Raises ValueError when the runs do not cover the records exactly.
    """
    event_times: Instants = np.frombuffer(times, "<i8", count)
    if not flags & _HAS_WATERMARKS:
        return event_times, None
    if not flags & _WATERMARK_RUNS:
        return event_times, np.frombuffer(times, "<i8", count, offset=8 * count)
    values: Instants = np.frombuffer(times, "<i8", runs, offset=8 * count)
    ends = np.frombuffer(times, "<i4", runs, offset=8 * (count + runs))
    lengths = np.diff(ends, prepend=0)
    if (int(ends[-1]) if runs else 0) != count or (lengths < 0).any():
        raise ValueError(f"watermark runs cover {int(ends[-1]) if runs else 0} of {count} records")
    return event_times, np.repeat(values, lengths)


def _encode_batch(batch: pa.RecordBatch) -> bytes | memoryview:
    """Encode one record batch message, compressed when that pays."""
    if batch.nbytes < _COMPRESS_BYTES_MIN:
        return memoryview(batch.serialize())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=_LZ4) as writer:
        writer.write_batch(batch)
    # A stream consists of the schema message, the batches, and an end marker of 8 bytes.
    return memoryview(sink.getvalue())[len(batch.schema.serialize()) : -8]

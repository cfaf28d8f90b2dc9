"""Bounds what a compressed Kafka batch may become, before it becomes it.

The limits of a fetch count compressed bytes, and 16 kB of zstd can be a gigabyte. aiokafka decompresses a batch in one
piece by functions of its modules; here they are replaced by ones that stop at a bound. Snappy cannot become more than
some twenty times what it was, and says its size first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
from aiokafka.errors import KafkaError
from aiokafka.record import default_records, legacy_records

EXPANDED_BYTES_MAX = 64_000_000
_PIECE_BYTES = 1_000_000
_CODECS = {"gzip_decode": "gzip", "lz4_decode": "lz4", "zstd_decode": "zstd"}


class ExpansionError(KafkaError):  # type: ignore[misc]
    """A batch would become larger than is taken, or is not what its compression says."""


def bound_expansion() -> None:
    """Make aiokafka decompress within the bound; once is enough, and again does nothing."""
    for module in _modules():
        for name, codec in _CODECS.items():
            if hasattr(module, name):
                setattr(module, name, _bounded(codec))


def _modules() -> list[Any]:
    found: list[Any] = [default_records, legacy_records]
    try:
        from aiokafka.record._crecords import default_records as compiled
        from aiokafka.record._crecords import legacy_records as compiled_legacy
    except ImportError:  # built without extensions
        return found
    return [*found, compiled, compiled_legacy]


def _bounded(codec: str) -> Callable[[Any], bytes]:
    def decode(payload: Any) -> bytes:
        pieces: list[bytes] = []
        size = 0
        try:
            with pa.input_stream(pa.py_buffer(bytes(payload)), compression=codec) as stream:
                while piece := stream.read(_PIECE_BYTES):
                    pieces.append(piece)
                    size += len(piece)
                    if size > EXPANDED_BYTES_MAX:
                        raise ExpansionError(
                            f"a batch of {len(payload)} bytes ({codec}) becomes more than {EXPANDED_BYTES_MAX} bytes"
                        )
        except (pa.ArrowException, OSError) as error:
            raise ExpansionError(f"a batch of {len(payload)} bytes is not {codec}: {error}") from error
        return b"".join(pieces)

    return decode

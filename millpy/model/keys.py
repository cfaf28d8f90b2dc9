"""Keys: canonical bytes, hashes, and intervals of the 32-bit hash space.

Canonical bytes outlive processes, versions and machines: golden vectors in tests/unit/model/test_keys.py pin them.

    str    b"s" + UTF-8                      int    b"i" + 8 bytes, big-endian two's complement
    bool   b"b" + one byte                   UUID   b"u" + 16 bytes
    bytes  b"y" + the bytes                  tuple  b"t" + per member: 4 bytes length, canonical bytes

A key cannot be a float, because 0.0 and -0.0 are equal and have different bytes, or null: a nullable field cannot be a
key.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType
from uuid import UUID

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

KeyHash = NewType("KeyHash", int)
Key = str | int | bool | UUID | bytes | tuple[Any, ...]
KEY_TYPES = (str, int, bool, UUID, bytes)
KEY_SPACE = 2**32
FEW_KEYS_MAX = 64
"""Up to this many rows plain Python is faster than column calls."""

_encode = msgspec.json.Encoder().encode


def canonical_bytes(key: Key) -> bytes:
    """Return the bytes whose hash places a key, in the format of the module docstring."""
    if isinstance(key, str):
        return b"s" + key.encode()
    if isinstance(key, bool):
        return b"b\x01" if key else b"b\x00"
    if isinstance(key, int):
        return b"i" + key.to_bytes(8, "big", signed=True)
    if isinstance(key, UUID):
        return b"u" + key.bytes
    if isinstance(key, bytes):
        return b"y" + key
    parts = [canonical_bytes(member) for member in key]
    return b"t" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def key_hash(key: Key) -> KeyHash:
    """Return the hash that places a key in [0, 2**32)."""
    return KeyHash(xxhash.xxh3_64_intdigest(canonical_bytes(key)) >> 32)


def is_key_of(key: object, key_types: tuple[type, ...]) -> bool:
    """Tell whether a value is a key of fields of these types; that of several fields is a tuple. A bool is no int."""
    members = (key,) if len(key_types) == 1 else key
    if not isinstance(members, tuple) or len(members) != len(key_types):
        return False
    return all(
        isinstance(m, kind) and (kind is bool) == isinstance(m, bool)
        for m, kind in zip(members, key_types, strict=True)
    )


def key_text(key: Key) -> bytes:
    """Encode a key as JSON, as `mill.keyed` stores it: `"dev-1"`, `7`, `["a", 3]`; UUIDs and bytes as text."""
    return msgspec.json.encode(key)


def key_texts(keys: Sequence[Key]) -> list[bytes]:
    """Encode many keys as `key_text` does."""
    return list(map(_encode, keys))


def key_from_text(text: bytes | str, key_types: tuple[type, ...]) -> Key:
    """Decode a key of `key_text`, given the Python types of its fields."""
    if len(key_types) == 1:
        return msgspec.json.decode(text, type=key_types[0])
    return msgspec.json.decode(text, type=tuple[key_types])  # type: ignore[valid-type]


@dataclass(frozen=True, slots=True, order=True)
class KeyInterval:
    """A half-open range [lo, hi) of the key-hash space: the unit of ownership of a computation (I1)."""

    lo: int
    hi: int

    def __post_init__(self) -> None:
        assert 0 <= self.lo < self.hi <= KEY_SPACE, (self.lo, self.hi)


def tile_key_space(count: int) -> list[KeyInterval]:
    """Cut the whole key space into `count` intervals that touch and do not overlap (I1)."""
    assert count >= 1, count
    bounds = [KEY_SPACE * index // count for index in range(count + 1)]
    return [KeyInterval(lo, hi) for lo, hi in itertools.pairwise(bounds)]


@dataclass(slots=True)
class KeyColumn:
    """The keys of n records, each distinct key once.

    Attributes:
        codes: int32[n], index into `keys` per record.
        keys: the distinct keys, in order of first appearance for small columns, else any order.
        hashes: int64[len(keys)], the key hash of each distinct key.
    """

    codes: npt.NDArray[np.int32]
    keys: list[Key]
    hashes: npt.NDArray[np.int64]

    def take(self, rows: npt.NDArray[np.int64]) -> KeyColumn:
        """Return the keys of the given rows, in their order; `keys` has only those that occur."""
        if len(rows) <= FEW_KEYS_MAX:
            places: dict[int, int] = {}
            few = [places.setdefault(code, len(places)) for code in self.codes[rows].tolist()]
            return KeyColumn(np.array(few, np.int32), [self.keys[code] for code in places], self.hashes[list(places)])
        used, codes = np.unique(self.codes[rows], return_inverse=True)
        return KeyColumn(codes.astype(np.int32), [self.keys[code] for code in used], self.hashes[used])


PLAIN_KEY_BYTES = 100
"""Bytes that count as one key of the cache; a longer key counts as several."""


class KeyHasher:
    """A bounded cache of the hashes of keys.

    Keys are cached by their exact types, too: True == 1 and (True, "a") == (1, "a"), but their canonical bytes differ,
    and one hasher serves steps with keys of many types.
    """

    def __init__(self, keys_max: int = 500_000) -> None:
        self._by_type: dict[Any, dict[Key, int]] = {}
        self._count = 0
        self._keys_max = keys_max

    def hashes(self, keys: Sequence[Key]) -> npt.NDArray[np.int64]:
        """Return the hash of each key (`key_hash`), as int64[len(keys)]."""
        if self._count > self._keys_max:
            self._by_type.clear()
            self._count = 0
        types = _types_of(keys)
        if len(types) > 1:
            return np.array([hashed for key in keys for hashed in self.hashes([key]).tolist()], np.int64)
        known = self._by_type.setdefault(types, {})
        found = list(map(known.get, keys))
        if None in found:
            missing = {key: key_hash(key) for key, hashed in zip(keys, found, strict=True) if hashed is None}
            known.update(missing)
            self._count += len(missing) + sum(map(_size_of, missing)) // PLAIN_KEY_BYTES
            found = list(map(known.get, keys))
        return np.array(found, dtype=np.int64)


def _size_of(key: Key) -> int:
    """Return the approximate bytes of a key's text."""
    return len(key) if isinstance(key, str | bytes) else len(str(key)) if isinstance(key, tuple) else 0


def _types_of(keys: Sequence[Key]) -> frozenset[Any]:
    """Return the distinct types of keys; the type of a tuple is the tuple of its members' types."""
    types: set[Any] = set(map(type, keys))
    if types == {tuple}:
        lengths = set(map(len, keys))  # type: ignore[arg-type]
        members = [set(map(type, column)) for column in zip(*keys, strict=False)]
        if len(lengths) == 1 and all(len(kinds) == 1 for kinds in members):
            return frozenset([tuple(kind for (kind,) in members)])
        return frozenset(tuple(map(type, key)) for key in keys)  # type: ignore[arg-type]
    return frozenset(types)


def distinct(column: pa.Array) -> tuple[npt.NDArray[np.int32], list[Any]]:
    """Return the codes per row and the distinct values of an Arrow column without nulls."""
    encoded = column.dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int32), encoded.dictionary.to_pylist()

"""Canonical bytes outlive processes and versions: these vectors must never change."""

import itertools
from uuid import UUID

import numpy as np
import pytest

from millpy.model.keys import (
    KEY_SPACE,
    Key,
    KeyHasher,
    canonical_bytes,
    key_from_text,
    key_hash,
    key_text,
    tile_key_space,
)

GOLDEN: list[tuple[Key, bytes]] = [
    ("dev-1", b"sdev-1"),
    ("", b"s"),
    ("grüße", b"sgr\xc3\xbc\xc3\x9fe"),
    (7, b"i\x00\x00\x00\x00\x00\x00\x00\x07"),
    (-1, b"i\xff\xff\xff\xff\xff\xff\xff\xff"),
    (True, b"b\x01"),
    (UUID(int=1), b"u" + bytes(15) + b"\x01"),
    (b"\x00", b"y\x00"),
    (("a", 3), b"t\x00\x00\x00\x02sa\x00\x00\x00\x09i\x00\x00\x00\x00\x00\x00\x00\x03"),
]
HASHES = [3519907745, 3602502865, 1106598836, 498229095, 34725835, 3341037820, 1635366107, 936464917, 4197229586]


@pytest.mark.parametrize(("key", "expected"), GOLDEN)
def test_canonical_bytes_are_pinned(key: Key, expected: bytes) -> None:
    assert canonical_bytes(key) == expected


def test_hashes_are_pinned() -> None:
    assert [key_hash(key) for key, _ in GOLDEN] == HASHES


def test_true_and_one_are_different_keys() -> None:
    hashes = KeyHasher().hashes([1, True])

    assert hashes[0] == key_hash(1)
    assert hashes[1] == key_hash(True)
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 64])
def test_intervals_tile_the_key_space(count: int) -> None:
    intervals = tile_key_space(count)

    assert intervals[0].lo == 0
    assert intervals[-1].hi == KEY_SPACE
    assert all(left.hi == right.lo for left, right in itertools.pairwise(intervals))
    for hashed in np.random.default_rng(1).integers(0, KEY_SPACE, 100):
        assert sum(interval.lo <= hashed < interval.hi for interval in intervals) == 1


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("dev-1", (str,)),
        (7, (int,)),
        (("a", 3), (str, int)),
        (UUID(int=5), (UUID,)),
        (b"\x01\xff", (bytes,)),
        (True, (bool,)),
    ],
)
def test_key_text_reads_back(key: Key, types: tuple[type, ...]) -> None:
    assert key_from_text(key_text(key), types) == key

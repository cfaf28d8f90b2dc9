"""A key's place: the same for every hasher, in every process, whatever other keys have been there before."""

from __future__ import annotations

import os
import subprocess
import sys
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy.model.keys import Key, KeyHasher, key_hash

# Small pools: equal values of different types (1 and True, "a" and b"a") have to meet.
MEMBERS = (
    st.sampled_from(["", "a", "1", "True", "grüße", "\x00", "😀"])
    | st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)])
    | st.booleans()
    | st.sampled_from([b"", b"a", b"\x00", b"\xff"])
    | st.sampled_from([UUID(int=0), UUID(int=1)])
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
    | st.integers(-(2**63), 2**63 - 1)
)
KEYS = MEMBERS | st.lists(MEMBERS, min_size=2, max_size=4).map(tuple)


@given(keys=st.lists(KEYS, max_size=60), known=st.integers(0, 20))
def test_hasher_with_a_full_cache_gives_every_key_its_own_hash(keys: list[Key], known: int) -> None:
    hasher = KeyHasher(keys_max=known)
    places = [key_hash(key) for key in keys]

    assert hasher.hashes(keys).tolist() == places
    assert hasher.hashes(keys).tolist() == places, "remembered ones"
    assert [int(hasher.hashes([key])[0]) for key in reversed(keys)] == places[::-1]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_hash_of_a_key_is_the_same_in_another_process(seed: str) -> None:
    keys: list[Key] = [True, 1, "1", b"1", UUID(int=1), (True, "a"), (1, "a"), (1, True), (True, 1), ("a", b"a")]
    program = (
        "from uuid import UUID; from millpy.model.keys import KeyHasher;"
        f"print(KeyHasher().hashes({keys[::-1]!r}).tolist()[::-1])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": seed}

    reported = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )

    assert reported.stdout.strip() == repr(KeyHasher().hashes(keys).tolist())
    assert reported.stdout.strip() == repr([key_hash(key) for key in keys])

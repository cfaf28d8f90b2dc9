"""The keys that are ahead of their interval, and what the store keeps of them."""

from __future__ import annotations

from millpy.model.time import Instant
from millpy.windowing.ahead import KeysAhead

KEYS = [("a",), ("b",), ("c",)]


def test_a_key_that_goes_ahead_again_before_its_deletion_stays_stored() -> None:
    ahead = KeysAhead()
    stored: dict[str, bytes | None] = {}

    def store() -> None:
        entries = ahead.take_entries(1)
        assert entries is not None
        assert len(set(entries.keys)) == len(entries.keys)
        stored.update(zip([key.decode() for key in entries.keys], entries.values, strict=True))

    ahead.advance(dict.fromkeys(KEYS, Instant(10)))
    store()
    ahead.forget(Instant(10))
    store()
    assert list(stored.values()) == [None, b"10", b"10"], "a turn deletes as few as it may emit"

    ahead.advance({("c",): Instant(20)})
    while ahead.has_deletions:
        store()

    assert list(stored.values()) == [None, None, b"20"]
    assert ahead.position_of(("c",), Instant(10)) == 20

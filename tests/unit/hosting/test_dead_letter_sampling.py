"""A number of dead letters is kept for each cause, and a number a day after that; a restart does not change this."""

from __future__ import annotations

import msgspec

from millpy.formats import Message
from millpy.hosting.dead_letter_sampling import DeadLetterSampler
from millpy.ingest.dead_letters import PayloadFormat
from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DeadLetter, Grant, Notice
from millpy.model.time import INSTANT_MIN

LIMITS = Limits(dead_letter_records_max=10, dead_letter_bytes_max=100_000, record_bytes_max=5_000)
DAY_US = 86_400_000_000


def a_checkpoint(count: int, *, payload: bytes = b"x", reason: str = "undecodable", **texts: str) -> Checkpoint:
    dead_letters = [DeadLetter(reason, texts.pop("detail", "why"), payload, "s", "c", **texts) for _ in range(count)]
    return Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, dead_letters=dead_letters)


def test_room_for_dead_letters_refills_within_a_day() -> None:
    kept = DeadLetterSampler(LIMITS)

    found = [len(kept.keep(a_checkpoint(100), at).dead_letters) for at in (0, 0, DAY_US // 2, DAY_US // 2, 30 * DAY_US)]

    assert found == [10, 0, 5, 0, 10]


def test_time_that_was_ahead_for_a_moment_does_not_stop_the_refill() -> None:
    kept = DeadLetterSampler(LIMITS)

    found = [len(kept.keep(a_checkpoint(100), at).dead_letters) for at in (3_650 * DAY_US, 0, DAY_US)]

    assert found == [10, 0, 10]


def test_causes_have_separate_room() -> None:
    kept = DeadLetterSampler(LIMITS)
    kept.keep(a_checkpoint(100), 0)

    assert len(kept.keep(a_checkpoint(3, reason="future"), 0).dead_letters) == 3


def test_counts_and_room_survive_every_restart() -> None:
    kept = DeadLetterSampler(LIMITS)
    seen = []
    for _ in range(5):
        checkpoint = kept.keep(a_checkpoint(4), 0)
        seen.append(len(checkpoint.dead_letters))
        kept = DeadLetterSampler.recovered(LIMITS, checkpoint.delta)

    assert seen == [4, 4, 2, 0, 0]
    (cause,) = kept.causes.values()
    assert (cause.seen, cause.kept) == (20, 10)


def test_dead_letters_that_are_not_stored_are_reported() -> None:
    checkpoint = DeadLetterSampler(LIMITS).keep(a_checkpoint(25), 0)

    assert checkpoint.unstored == {("c", "undecodable"): 15}
    assert checkpoint.notices == [Notice("dead_letters_not_kept", 15, ["c (undecodable)"])]


def test_bytes_and_texts_are_bounded_too() -> None:
    checkpoint = DeadLetterSampler(LIMITS).keep(
        a_checkpoint(10, payload=b"x" * 20_000, detail="d" * 50_000, traceback="t" * 50_000), 0
    )

    assert 0 < len(checkpoint.dead_letters) < 10
    for dead_letter in checkpoint.dead_letters[:1]:
        assert len(dead_letter.payload) == 5_001
        assert len(dead_letter.detail) < 1_100
        assert len(dead_letter.traceback) == 8_000


def test_what_is_kept_of_a_long_message_is_no_shorter_message() -> None:
    """A cut line of CSV would be replayed as a valid record, and the rest of the message would be lost."""
    message, line = PayloadFormat.from_message(Message(b"", arrived_at=1)), PayloadFormat("csv", ("a",))
    wires = [msgspec.json.encode(wire).decode() for wire in (message, line)]

    for size in (LIMITS.message_bytes_max, LIMITS.message_bytes_max + 10):
        kept = [
            DeadLetterSampler(LIMITS).keep(a_checkpoint(1, payload=b"x" * size, wire=wire), 0).dead_letters[0].payload
            for wire in wires
        ]

        assert [len(payload) for payload in kept] == [min(size, LIMITS.message_bytes_max + 1), 5_001]

"""Of each cause so many letters are kept, and so many a day after that; a restart changes nothing of it."""

from __future__ import annotations

from millpy.limits import Limits
from millpy.model.checkpoint import Checkpoint, DeadLetter, Grant
from millpy.model.time import INSTANT_MIN
from millpy.runtime.kept_letters import KeptLetters

LIMITS = Limits(set_aside_records_max=10, set_aside_bytes_max=100_000, record_bytes_max=5_000)
DAY_US = 86_400_000_000


def a_checkpoint(count: int, *, payload: bytes = b"x", reason: str = "undecodable", **texts: str) -> Checkpoint:
    letters = [DeadLetter(reason, texts.pop("detail", "why"), payload, "s", "c", **texts) for _ in range(count)]
    return Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, dead_letters=letters)


def test_room_comes_back_within_a_day_and_is_never_more_than_at_first() -> None:
    kept = KeptLetters(LIMITS)

    found = [len(kept.keep(a_checkpoint(100), at).dead_letters) for at in (0, 0, DAY_US // 2, DAY_US // 2, 30 * DAY_US)]

    assert found == [10, 0, 5, 0, 10]


def test_time_that_was_ahead_for_a_moment_does_not_keep_the_room_from_coming_back() -> None:
    kept = KeptLetters(LIMITS)

    found = [len(kept.keep(a_checkpoint(100), at).dead_letters) for at in (3_650 * DAY_US, 0, DAY_US)]

    assert found == [10, 0, 10]


def test_one_cause_takes_nothing_of_another() -> None:
    kept = KeptLetters(LIMITS)
    kept.keep(a_checkpoint(100), 0)

    assert len(kept.keep(a_checkpoint(3, reason="future"), 0).dead_letters) == 3


def test_counts_and_room_are_those_of_before_after_every_restart() -> None:
    kept = KeptLetters(LIMITS)
    seen = []
    for _ in range(5):
        checkpoint = kept.keep(a_checkpoint(4), 0)
        seen.append(len(checkpoint.dead_letters))
        kept = KeptLetters.recovered(LIMITS, checkpoint.delta)

    assert seen == [4, 4, 2, 0, 0]
    (cause,) = kept.causes.values()
    assert (cause.seen, cause.kept) == (20, 10)


def test_what_is_not_kept_is_told() -> None:
    checkpoint = KeptLetters(LIMITS).keep(a_checkpoint(25), 0)

    assert checkpoint.unkept == {("c", "undecodable"): 15}


def test_bytes_are_bounded_too_and_so_is_each_text() -> None:
    checkpoint = KeptLetters(LIMITS).keep(
        a_checkpoint(10, payload=b"x" * 20_000, detail="d" * 50_000, traceback="t" * 50_000), 0
    )

    assert 0 < len(checkpoint.dead_letters) < 10
    for letter in checkpoint.dead_letters[:1]:
        assert len(letter.payload) == 5_001
        assert len(letter.detail) < 1_100
        assert len(letter.traceback) == 8_000

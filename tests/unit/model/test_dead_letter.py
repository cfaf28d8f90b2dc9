"""What is written down of an error whose message is long: where it was raised, and how the message begins."""

from __future__ import annotations

import pytest

from millpy.model.checkpoint import DeadLetter
from millpy.model.dead_letter import MESSAGE_CHARACTERS_MAX, TRACEBACK_CHARACTERS_MAX, dead_letter_of

LONG = "line\n" * 2_000_000


def raised_here(message: str) -> BaseException:
    with pytest.raises(ValueError) as caught:
        raise ValueError(message)
    return caught.value


def raised_because(message: str) -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("short") from raised_here(message)
    return caught.value


def letter_of(error: BaseException) -> DeadLetter:
    return dead_letter_of(error, b"{}", stream="s", computation="c", event_time=None, key=None)


@pytest.mark.parametrize("error", [raised_here(LONG), raised_because(LONG)], ids=["itself", "its cause"])
def test_long_message_leaves_room_for_the_place_of_the_error(error: BaseException) -> None:
    dead_letter = letter_of(error)

    assert "in raised_" in dead_letter.traceback
    assert dead_letter.traceback.count("\n") < MESSAGE_CHARACTERS_MAX
    assert len(dead_letter.traceback) <= TRACEBACK_CHARACTERS_MAX
    assert dead_letter.detail in ("ValueError: line", "RuntimeError: short")


def test_short_message_is_stored_whole_with_its_causes() -> None:
    dead_letter = letter_of(raised_because("the cause"))

    assert "ValueError: the cause" in dead_letter.traceback
    assert "RuntimeError: short" in dead_letter.traceback
    assert dead_letter.detail == "RuntimeError: short"


def test_cycle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first

    assert letter_of(first).detail == "ValueError: a"

"""What the log says of records that are set aside."""

import pytest

from millpy.model.checkpoint import Checkpoint, DeadLetter, Grant
from millpy.model.time import INSTANT_MIN
from millpy.runtime.set_aside_log import EVERY_S, SetAsideLog


def letters(count: int, *, reason: str = "undecodable", detail: str = "no JSON") -> Checkpoint:
    found = [DeadLetter(reason, detail, b"?", "readings", "readings") for _ in range(count)]
    return Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, dead_letters=found)


def test_the_first_are_told_at_once_and_the_others_once_a_minute_with_their_number(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = SetAsideLog()

    told.add("readings", letters(1))
    told.tell(100.0)
    for turn in range(5):
        told.add("readings", letters(3, detail=f"no JSON, turn {turn}"))
        told.tell(100.0 + turn)
    assert caplog.messages == ["1 record of readings dead-lettered (undecodable): no JSON"]

    told.tell(100.0 + EVERY_S)
    told.tell(100.0 + 3 * EVERY_S)
    assert caplog.messages[1:] == ["15 records of readings dead-lettered (undecodable): no JSON, turn 0"]


def test_another_reason_does_not_wait_for_the_first_ones_minute(caplog: pytest.LogCaptureFixture) -> None:
    told = SetAsideLog()

    told.add("readings", letters(1))
    told.tell(0.0)
    told.add("readings", letters(2, reason="future", detail="a day ahead"))
    told.tell(0.0)

    assert caplog.messages[1:] == ["2 records of readings dead-lettered (future): a day ahead"]


def test_who_leaves_tells_what_is_untold(caplog: pytest.LogCaptureFixture) -> None:
    told = SetAsideLog()
    told.add("readings", letters(1))
    told.tell(0.0)

    told.add("readings", letters(4))
    told.tell(1.0, everything=True)
    told.tell(2.0, everything=True)

    assert caplog.messages[1:] == ["4 records of readings dead-lettered (undecodable): no JSON"]

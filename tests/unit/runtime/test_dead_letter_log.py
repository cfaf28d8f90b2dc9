"""Log lines about dead letters."""

import pytest

from millpy.model.checkpoint import Checkpoint, DeadLetter, Grant
from millpy.model.time import INSTANT_MIN
from millpy.runtime.dead_letter_log import EVERY_S, DeadLetterLog


def dead_letters(count: int, *, reason: str = "undecodable", detail: str = "no JSON") -> Checkpoint:
    found = [DeadLetter(reason, detail, b"?", "readings", "readings") for _ in range(count)]
    return Checkpoint(Grant(1, 1), 1, INSTANT_MIN, INSTANT_MIN, dead_letters=found)


def test_the_first_are_logged_at_once_and_the_others_counted_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dead_letter_log = DeadLetterLog()

    dead_letter_log.add("readings", dead_letters(1))
    dead_letter_log.log_due(100.0)
    for turn in range(5):
        dead_letter_log.add("readings", dead_letters(3, detail=f"no JSON, turn {turn}"))
        dead_letter_log.log_due(100.0 + turn)
    assert caplog.messages == ["1 record of readings dead-lettered (undecodable): no JSON"]

    dead_letter_log.log_due(100.0 + EVERY_S)
    dead_letter_log.log_due(100.0 + 3 * EVERY_S)
    assert caplog.messages[1:] == ["15 records of readings dead-lettered (undecodable): no JSON, turn 0"]


def test_another_reason_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    dead_letter_log = DeadLetterLog()

    dead_letter_log.add("readings", dead_letters(1))
    dead_letter_log.log_due(0.0)
    dead_letter_log.add("readings", dead_letters(2, reason="future", detail="a day ahead"))
    dead_letter_log.log_due(0.0)

    assert caplog.messages[1:] == ["2 records of readings dead-lettered (future): a day ahead"]


def test_leaving_worker_reports_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    dead_letter_log = DeadLetterLog()
    dead_letter_log.add("readings", dead_letters(1))
    dead_letter_log.log_due(0.0)

    dead_letter_log.add("readings", dead_letters(4))
    dead_letter_log.log_due(1.0, everything=True)
    dead_letter_log.log_due(2.0, everything=True)

    assert caplog.messages[1:] == ["4 records of readings dead-lettered (undecodable): no JSON"]

"""What becomes of refused messages: when each is sent again, what waits behind it, and how it is settled."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta
from typing import Any

from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.runtime.refused_messages import RETRY_AFTER_S_MAX, RefusedMessages
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SendBound
from millpy.sinks.refusal_policy import RefusalPolicy

MANY = SendBound(records=100, bytes=1_000_000)
LIMITS = Limits(retry_s_min=1.0)
FAR = 10_000.0


class Longest(random.Random):
    """Draws the longest delays."""

    def uniform(self, a: float, b: float) -> float:
        return b


def subject_of(policy: RefusalPolicy | None = None, stored: Any = ()) -> RefusedMessages:
    return RefusedMessages(policy or RefusalPolicy(), LIMITS, Longest(), stored)


def message(position: int, key: str = "a") -> SinkMessages:
    return SinkMessages(position, [key.encode()], [b"%d" % position], [0])


def wait(subject: RefusedMessages, *positions: int, key: str = "a") -> None:
    for position in positions:
        subject.wait(message(position, key), b'"%s"' % key.encode(), Instant(0))


def refuse(subject: RefusedMessages, position: int, now: float = 0.0, **how: Any) -> None:
    subject.refuse(position, "no", now, Instant(round(now * 1e6)), **({"final": False} | how))


def store_all(subject: RefusedMessages) -> None:
    """Let everything that has changed be stored."""
    changes = dict(subject.changes)
    subject.on_stored([c for c in changes.values() if c is not None], [p for p, c in changes.items() if c is None])
    assert not subject.changes


def due(subject: RefusedMessages, now: float, before: int = 1_000, **how: Any) -> list[int]:
    found = subject.due(now, MANY, before, **how)
    return [] if found is None else list(found.positions)


def given_up(subject: RefusedMessages, before: int = 1_000) -> list[int]:
    return [waiting.position for waiting in subject.take_given_up(before)]


def test_delays_double_and_the_other_side_may_ask_for_longer_ones() -> None:
    subject = subject_of()
    wait(subject, 5)
    delays = []
    for asked in (None, None, None, 100.0, 0.5, 2 * RETRY_AFTER_S_MAX):
        refuse(subject, 5, retry_after_s=asked)
        at = subject.next_due(1_000)
        assert at is not None
        assert due(subject, at - 0.001) == []
        assert due(subject, at) == [5]
        delays.append(at)

    assert delays == [1.0, 2.0, 4.0, 100.0, 16.0, RETRY_AFTER_S_MAX]


def test_only_the_first_message_of_a_refused_key_is_sent_again_and_the_rest_at_once_after_it() -> None:
    subject = subject_of()
    wait(subject, 3, 4, 5)
    wait(subject, 6, key="b")
    refuse(subject, 3)
    refuse(subject, 6)

    assert due(subject, FAR) == [3, 6]
    subject.accept([3])
    assert due(subject, 0.0) == [4, 5]
    assert due(subject, 0.0, firsts=True) == [4]
    assert due(subject, 0.0, before=5) == [4]
    assert subject.due(0.0, SendBound(records=1, bytes=1), 1_000) is not None
    assert len(subject.due(0.0, SendBound(records=1, bytes=1), 1_000) or ()) == 1


def test_messages_that_are_added_out_of_order_wait_in_order() -> None:
    subject = subject_of()
    wait(subject, 7, 9, 8)
    refuse(subject, 7)
    subject.accept([7])

    assert due(subject, FAR) == [8, 9]
    assert due(subject, FAR, firsts=True) == [8]


def test_a_message_behind_a_refused_one_of_its_key_waits_and_others_pass() -> None:
    subject = subject_of()
    wait(subject, 5)
    refuse(subject, 5)
    messages = SinkMessages(4, [b"a", b"a", b"a", b"b"], [b"1"] * 4, [0] * 4)

    assert subject.separate(messages) == ([0, 3], [2])


def test_a_message_that_is_given_up_holds_its_key_until_it_is_settled_unless_the_sink_stores_positions() -> None:
    subject = subject_of(RefusalPolicy(attempts=1))
    wait(subject, 5)
    refuse(subject, 5)

    assert subject.separate(message(6)) == ([], [0])
    subject.be_final()
    assert subject.separate(message(6)) == ([0], [])


def test_a_message_is_given_up_after_its_attempts_or_its_time() -> None:
    subject = subject_of(RefusalPolicy(attempts=2, after=timedelta(seconds=10)))
    wait(subject, 1)
    wait(subject, 2, key="b")
    refuse(subject, 1, 0.0)
    refuse(subject, 2, 5.0)
    store_all(subject)
    assert given_up(subject) == []
    refuse(subject, 1, 9.0)
    store_all(subject)
    assert given_up(subject) == [1]

    by_time = subject_of(RefusalPolicy(after=timedelta(seconds=10)))
    wait(by_time, 2)
    for at, gone in ((5.0, []), (14.999, []), (15.0, [2])):  # since it was refused first
        refuse(by_time, 2, at)
        store_all(by_time)
        assert given_up(by_time) == gone


def test_a_message_that_was_not_sent_comes_again_without_an_attempt() -> None:
    subject = subject_of(RefusalPolicy(attempts=1))
    wait(subject, 1, 2)
    refuse(subject, 1, is_tried=False)
    store_all(subject)

    assert given_up(subject) == []
    assert due(subject, 0.499) == []
    assert due(subject, 0.5) == [1, 2]
    assert subject.separate(message(3)) == ([], [0])
    refuse(subject, 1, 1.0)
    store_all(subject)
    assert given_up(subject) == [1]


def test_a_message_becomes_a_dead_letter_once_when_it_is_stored_and_passed() -> None:
    subject = subject_of()
    wait(subject, 5)
    refuse(subject, 5, final=True)

    assert given_up(subject) == [], "what is not stored would be stored again behind the commit"
    store_all(subject)
    assert given_up(subject, before=5) == [], "the position has not passed it"
    assert due(subject, FAR) == []
    assert given_up(subject) == [5]
    assert given_up(subject) == [], "a turn has it"
    subject.settle([5], ())
    assert len(subject) == 0
    assert subject.size == 0


def test_a_change_that_has_changed_again_is_stored_again() -> None:
    subject = subject_of()
    wait(subject, 5)
    refuse(subject, 5)
    stored = subject.changes[5]
    assert stored is not None
    refuse(subject, 5)

    subject.on_stored([stored], [])

    again = subject.changes[5]
    assert again is not None
    assert (stored.attempts, again.attempts) == (1, 2)
    subject.on_stored([], [5])
    assert subject.changes, "it was not accepted"


def test_a_parked_key_waits_for_its_ticket_and_begins_anew() -> None:
    subject = subject_of(RefusalPolicy(attempts=1, then="park"))
    wait(subject, 5, 6)
    wait(subject, 7, key="b")
    refuse(subject, 5)
    assert due(subject, FAR) == [7]
    assert (subject.parked_keys, subject.next_due(7)) == (1, None)
    assert given_up(subject) == []

    assert subject.parked(b'"a"', 6) is None
    assert subject.parked(b'"b"', 5) is None, "the ticket is of another key"
    parked = subject.parked(b'"a"', 5)
    assert parked is not None
    assert not subject.can_release(parked, 1_000), "it is not stored yet"
    store_all(subject)
    assert not subject.can_release(parked, 5)
    assert subject.can_release(parked, 1_000)
    subject.settle((), [b'"a"'])
    assert subject.parked_keys == 0
    assert due(subject, 0.0, before=7) == [5, 6]
    assert parked.attempts == 0


def test_a_sink_that_stores_positions_gives_up_what_was_refused_and_keeps_what_is_parked() -> None:
    subject = subject_of(RefusalPolicy(attempts=2, then="park"))
    wait(subject, 1)
    wait(subject, 2, key="b")
    wait(subject, 3, key="c")
    refuse(subject, 1)
    refuse(subject, 2)
    refuse(subject, 2)
    store_all(subject)

    subject.be_final()

    assert given_up(subject) == [1]
    assert subject.parked(b'"b"', 2) is not None
    assert due(subject, FAR) == [3]


def test_a_commit_of_unknown_outcome_is_found_by_what_is_stored() -> None:
    subject = subject_of(RefusalPolicy(attempts=1, then="park"))
    wait(subject, 1)
    wait(subject, 2, key="b")
    wait(subject, 3, key="c")
    for position in (1, 2):
        refuse(subject, position)
    refuse(subject, 3, final=True)
    store_all(subject)
    parked = [waiting.as_stored() for waiting in subject]
    for waiting in subject:
        waiting.settling = True
    kept, released = (next(found for found in parked if found.position == position) for position in (1, 2))

    subject.reconcile([kept, replace(released, parked=False, attempts=0, why="")])

    assert 3 not in subject, "it is a dead letter now"
    assert subject.parked(b'"a"', 1) is not None, "the commit has not released it"
    assert due(subject, 0.0) == [2]
    assert not any(waiting.settling for waiting in subject)


def test_a_new_owner_knows_what_is_stored_in_order() -> None:
    subject = subject_of(RefusalPolicy(attempts=1, then="park"))
    wait(subject, 5, 6)
    wait(subject, 7, key="b")
    refuse(subject, 5)
    stored = [waiting.as_stored() for waiting in subject]

    again = subject_of(RefusalPolicy(attempts=1, then="park"), stored=reversed(stored))

    assert [waiting.position for waiting in again] == [5, 6, 7]
    assert (len(again), again.size, again.parked_keys) == (3, subject.size, 1)
    assert due(again, 0.0) == [7]


def test_what_waits_is_bounded_and_only_what_the_position_has_passed_counts_if_it_must_pass() -> None:
    subject = RefusedMessages(RefusalPolicy(), Limits(refused_records_max=2), Longest())
    wait(subject, 5)
    assert not subject.is_full()
    wait(subject, 6)
    assert subject.is_full()
    assert not subject.is_full(6)
    assert subject.is_full(7)

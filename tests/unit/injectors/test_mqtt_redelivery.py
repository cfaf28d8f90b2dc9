"""Which messages may come again, and until when that is remembered."""

from __future__ import annotations

from millpy.injectors.mqtt_redelivery import DIGEST_BYTES, Redeliveries

HERE, LATER = object(), object()


def a_digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def digests(*numbers: int) -> list[bytes]:
    return [a_digest(number) for number in numbers]


class Notes(dict[str, bytes]):
    """What a store keeps of them."""

    def commit(self, notes: dict[str, bytes | None]) -> None:
        for name, note in notes.items():
            if note is None:
                del self[name]
            else:
                self[name] = note


def never(_ping: int) -> bool:
    return False


def test_what_was_taken_is_known_only_once_it_is_committed() -> None:
    redeliveries = Redeliveries({}, 100)
    sent, _ = redeliveries.take(digests(1, 2), HERE)
    assert redeliveries.recognize(a_digest(1), LATER) is None
    assert redeliveries.recognize(a_digest(3), LATER) is False

    redeliveries.commit(sent)

    assert redeliveries.recognize(a_digest(1), LATER)
    assert redeliveries.recognize(a_digest(2), LATER)
    assert not redeliveries.recognize(a_digest(3), LATER)


def test_next_owner_knows_what_was_committed_and_not_what_was_only_taken() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    _, notes = redeliveries.take(digests(1), HERE)
    stored.commit(notes)
    redeliveries.take(digests(2), HERE)

    owner = Redeliveries(stored, 100)

    assert owner.recognize(a_digest(1), HERE)
    assert not owner.recognize(a_digest(2), HERE)
    _, notes = owner.take(digests(3), HERE)
    stored.commit(notes)
    assert len(Redeliveries(stored, 100)) == 2, "the name of a note is not used again"


def test_equal_messages_are_passed_over_as_often_as_they_were_committed_on_each_connection() -> None:
    redeliveries = Redeliveries({}, 100)
    sent, _ = redeliveries.take(digests(1, 1), HERE)
    redeliveries.commit(sent)

    assert [redeliveries.recognize(a_digest(1), LATER) for _ in range(3)] == [True, True, False]
    assert redeliveries.recognize(a_digest(1), object()), "what is not acknowledged comes again on the next"


def test_answer_behind_the_acknowledgement_lets_the_next_commit_forget() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    sent, notes = redeliveries.take(digests(1), HERE)
    stored.commit(notes)
    redeliveries.commit(sent)
    sent.ping = 7

    redeliveries.prove(HERE, lambda ping: ping <= 6, drained=True)
    assert len(redeliveries) == 1
    redeliveries.prove(HERE, lambda ping: ping <= 7, drained=False)
    assert len(redeliveries) == 0
    assert stored, "forgetting is part of a commit"

    _, notes = redeliveries.take(digests(2), HERE)
    stored.commit(notes)
    assert len(stored) == 1


def test_what_another_connection_left_is_forgotten_when_the_backlog_is_over() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    sent, notes = redeliveries.take(digests(1), HERE)
    stored.commit(notes)
    redeliveries.commit(sent)
    sent.ping = 7

    redeliveries.prove(LATER, lambda _: True, drained=False)
    assert redeliveries.recognize(a_digest(1), LATER), "a ping of one connection says nothing of another"
    redeliveries.prove(LATER, never, drained=True)

    assert not redeliveries.recognize(a_digest(1), LATER)


def test_no_more_is_remembered_than_may_come_again() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 10)
    for number in range(100):
        sent, notes = redeliveries.take(digests(2 * number, 2 * number + 1), HERE)
        stored.commit(notes)
        redeliveries.commit(sent)
        redeliveries.prove(LATER, never, drained=False)

    assert len(redeliveries) <= 12
    assert sum(map(len, stored.values())) <= 12 * 2 * DIGEST_BYTES
    assert Redeliveries(stored, 10).recognize(a_digest(199), HERE)
    assert not Redeliveries(stored, 10).recognize(a_digest(0), HERE)

"""Which messages may come again, and until when that is remembered."""

from __future__ import annotations

import pytest

from millpy.sources.mqtt.redelivery import DIGEST_BYTES, Redeliveries

HERE, LATER = object(), object()


def a_digest(number: int) -> bytes:
    return number.to_bytes(DIGEST_BYTES, "big")


def digests(*numbers: int) -> list[bytes]:
    return [a_digest(number) for number in numbers]


class Notes(dict[str, bytes]):
    """Return the notes that a store keeps."""

    def commit(self, notes: dict[str, bytes | None]) -> None:
        for name, note in notes.items():
            if note is None:
                del self[name]
            else:
                self[name] = note


def never(_ping: int) -> bool:
    return False


def test_messages_are_known_only_once_committed() -> None:
    redeliveries = Redeliveries({}, 100)
    sent, _ = redeliveries.take(digests(1, 2), HERE)
    assert redeliveries.recognize(a_digest(1)) is None, "it may be, when that commit is known"
    assert redeliveries.recognize(a_digest(3)) is False

    redeliveries.commit(sent)

    assert redeliveries.recognize(a_digest(1))
    assert redeliveries.recognize(a_digest(2))
    assert redeliveries.recognize(a_digest(3)) is False


def test_next_owner_knows_only_committed_messages() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    _, notes = redeliveries.take(digests(1), HERE)
    stored.commit(notes)
    redeliveries.take(digests(2), HERE)

    owner = Redeliveries(stored, 100)

    assert owner.recognize(a_digest(1))
    assert not owner.recognize(a_digest(2))
    _, notes = owner.take(digests(3), HERE)
    stored.commit(notes)
    assert len(Redeliveries(stored, 100)) == 2, "the name of a note is not used again"


def test_processed_acknowledgement_lets_the_next_commit_forget() -> None:
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


def test_notes_of_another_connection_are_forgotten_after_the_backlog() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    sent, notes = redeliveries.take(digests(1), HERE)
    stored.commit(notes)
    redeliveries.commit(sent)
    sent.ping = 7

    redeliveries.prove(LATER, lambda _: True, drained=False)
    assert redeliveries.recognize(a_digest(1)), "a ping of one connection says nothing of another"
    redeliveries.prove(LATER, never, drained=True)

    assert not redeliveries.recognize(a_digest(1))


def test_the_oldest_notes_are_forgotten_first_but_never_one_that_is_not_committed() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    for number in range(12):  # a tenth one, whose name is longer
        sent, notes = redeliveries.take(digests(number), HERE)
        stored.commit(notes)
        redeliveries.commit(sent)
    owner = Redeliveries(stored, 8)
    owner.take(digests(12), HERE)
    assert [number for number in range(13) if owner.recognize(a_digest(number)) is False] == [0, 1, 2, 3]

    pending = Redeliveries({}, 1)
    for number in range(3):
        pending.take(digests(number), HERE)
    assert len(pending) == 3, "each of them may be committed yet"


def test_only_messages_that_may_be_redelivered_are_remembered() -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 10)
    for number in range(100):
        sent, notes = redeliveries.take(digests(2 * number, 2 * number + 1), HERE)
        stored.commit(notes)
        redeliveries.commit(sent)
        redeliveries.prove(LATER, never, drained=False)

    assert len(redeliveries) <= 12
    assert sum(map(len, stored.values())) <= 12 * 2 * DIGEST_BYTES
    assert Redeliveries(stored, 10).recognize(a_digest(199))
    assert not Redeliveries(stored, 10).recognize(a_digest(0))


@pytest.mark.parametrize(
    "name, note",
    [("sent:3", b"{"), ("sent:3", b"7"), ("sent:3", b'"?"'), ("sent:3", b"\xff"), ("sent:x", b'""'), ("sent:", b'""'),
     ("sent:" + "9" * 5_000, b'""'), ("a/path", b'{"size": 1}')],
)  # fmt: skip
def test_note_that_cannot_be_read_is_forgotten_with_the_next_commit(name: str, note: bytes) -> None:
    stored, redeliveries = Notes(), Redeliveries({}, 100)
    stored.commit(redeliveries.take(digests(1), HERE)[1])
    stored[name] = note

    owner = Redeliveries(stored, 100)

    assert owner.recognize(a_digest(1)), "the others are known"
    stored.commit(owner.take(digests(2), HERE)[1])
    assert name not in stored
    assert len(Redeliveries(stored, 100)) == 2

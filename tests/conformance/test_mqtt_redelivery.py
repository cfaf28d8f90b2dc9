"""A real broker redelivers committed messages that were not acknowledged; they do not count again."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from millpy.embedded import EmbeddedBroker
from millpy.ingest.protocol import SourceBatch
from millpy.limits import Limits
from millpy.sources.mqtt.injector import MqttInjector
from tests.conformance.mqtt_subject import an_injector, publish, take, take_payloads, until, until_quiet

IMPATIENT = Limits(lease_ttl_s=0.5, retry_s_min=0.01, retry_s_max=0.01)


def stored(notes: dict[str, bytes], taken: SourceBatch) -> None:
    """Apply the notes of a bundle to the stored ones, as its commit does."""
    for name, note in taken.notes.items():
        if note is None:
            del notes[name]
        else:
            notes[name] = note


async def take_all(injector: MqttInjector, count: int, notes: dict[str, bytes]) -> list[SourceBatch]:
    found: list[SourceBatch] = []
    while sum(len(taken.payloads) for taken in found) < count:
        found.append(await take(injector))
        stored(notes, found[-1])
    return found


def drop(injector: MqttInjector) -> None:
    """Cut its connection as a network does."""
    session = injector._session
    assert session is not None
    session.connection.mark_lost("cut by the test")


@pytest.mark.parametrize("protocol", [5, 311])
async def test_nothing_counts_twice_after_an_owner_died_before_acknowledging(
    broker: EmbeddedBroker, protocol: int
) -> None:
    notes: dict[str, bytes] = {}
    first = an_injector(broker.port, deduplicated=True, protocol=protocol)
    await first.open(None)
    await publish(broker.port, [b"1", b"2", b"[3,3]"])
    await take_all(first, 3, notes)
    drop(first)
    await first.close()
    await publish(broker.port, [b"2", b"4"])

    second = an_injector(broker.port, deduplicated=True, notes=notes, protocol=protocol)
    await second.open(None)

    assert await take_payloads(second, 2) == [b"2", b"4"], "the same again, but not redelivered, is a record"
    await second.close()


async def test_nothing_counts_twice_after_a_connection_was_lost_before_the_acknowledgement(
    broker: EmbeddedBroker,
) -> None:
    injector = an_injector(broker.port, deduplicated=True, limits=IMPATIENT)
    await injector.open(None)
    await publish(broker.port, [b"1", b"2"])
    taken = await take_all(injector, 2, {})
    drop(injector)
    for each in taken:
        await injector.acknowledge(each.token)
    await until(injector, lambda: injector._session is not None)
    await publish(broker.port, [b"3"])

    assert await take_payloads(injector, 1) == [b"3"]
    await injector.close()


async def test_nothing_counts_twice_after_a_connection_was_lost_during_a_commit(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, deduplicated=True, limits=IMPATIENT)
    await injector.open(None)
    await publish(broker.port, [b"1"])
    (taken,) = await take_all(injector, 1, {})
    drop(injector)
    await until(injector, lambda: injector._session is not None and len(injector._session.inbox) > 0)
    await publish(broker.port, [b"2"])

    assert await injector.take() is None, "it may be committed, and may be not"
    await injector.acknowledge(taken.token)

    assert await take_payloads(injector, 1) == [b"2"]
    await injector.close()


async def test_skipped_messages_are_acknowledged_and_not_redelivered_again(
    broker: EmbeddedBroker,
) -> None:
    notes: dict[str, bytes] = {}
    first = an_injector(broker.port, deduplicated=True)
    await first.open(None)
    await publish(broker.port, [b"1", b"2"])
    await take_all(first, 2, notes)
    drop(first)
    await first.close()
    second = an_injector(broker.port, deduplicated=True, notes=notes)
    await second.open(None)
    await until_quiet(second)
    await second.close()

    third = an_injector(broker.port, deduplicated=True)
    await third.open(None)
    await publish(broker.port, [b"3"])

    assert await take_payloads(third, 1) == [b"3"]
    await third.close()


async def test_notes_are_forgotten_once_the_broker_has_processed_the_acknowledgements(broker: EmbeddedBroker) -> None:
    notes: dict[str, bytes] = {"sent:7": b'"%b"' % (b"A" * 22 + b"==")}
    injector = an_injector(broker.port, deduplicated=True, notes=notes)
    await injector.open(None)
    await until_quiet(injector)
    async with asyncio.timeout(60):
        number = 0
        while "sent:7" in notes or len(notes) > 1:
            await publish(broker.port, [b"%d" % number])
            for taken in await take_all(injector, 1, notes):
                await injector.acknowledge(taken.token)
            number += 1
    await injector.close()


async def test_redelivered_message_counts_again_without_dedupe_ids(broker: EmbeddedBroker) -> None:
    notes: dict[str, bytes] = {}
    first = an_injector(broker.port)
    await first.open(None)
    await publish(broker.port, [b"1"])
    await take_all(first, 1, notes)
    drop(first)
    await first.close()
    assert not notes

    second = an_injector(broker.port, notes=notes)
    await second.open(None)

    assert await take_payloads(second, 1) == [b"1"]
    await second.close()


async def test_equal_message_in_flight_is_not_mistaken_for_a_redelivery(broker: EmbeddedBroker) -> None:
    """A record without an id is never a duplicate, and neither is one beyond the horizon."""
    notes: dict[str, bytes] = {}
    first = an_injector(broker.port, deduplicated=True)
    await first.open(None)
    await publish(broker.port, [b"1"])
    for taken in await take_all(first, 1, notes):
        await first.acknowledge(taken.token)
    await publish(broker.port, [b"1"])
    await take(first)  # this turn does not commit
    await first.close()

    second = an_injector(broker.port, deduplicated=True, notes=notes)
    await second.open(None)

    assert await take_payloads(second, 1) == [b"1"]
    await second.close()


async def test_notes_of_another_owner_are_forgotten_though_a_turn_is_always_in_flight(broker: EmbeddedBroker) -> None:
    notes: dict[str, bytes] = {"sent:7": b'"%b"' % (b"A" * 22 + b"==")}
    injector = an_injector(broker.port, deduplicated=True, notes=notes)
    await injector.open(None)
    await publish(broker.port, [b"first"])
    await until(injector, lambda: injector._session is not None and injector._session.inbox.records == 1)
    under_way: list[SourceBatch] = []
    async with asyncio.timeout(60):
        while "sent:7" in notes:
            await publish(broker.port, [b"%d" % len(notes)])
            under_way += await take_all(injector, 1, notes)
            if len(under_way) > 1:
                await injector.acknowledge(under_way.pop(0).token)
    await injector.close()


async def test_lost_connections_do_not_stay_in_memory(broker: EmbeddedBroker) -> None:
    """Lost connections are freed even while their messages may be redelivered, because their inboxes are large."""
    injector = an_injector(broker.port, deduplicated=True, limits=IMPATIENT)
    await injector.open(None)
    sessions = []
    for number in range(3):
        sessions.append(weakref.ref(injector._session))
        await publish(broker.port, [b"%d" % number])
        (taken,) = await take_all(injector, 1, {})
        drop(injector)
        await injector.acknowledge(taken.token)
        del taken
        await until(injector, lambda: injector._session is not None and injector._session is not sessions[-1]())
    gc.collect()

    assert sessions[0]() is None
    await injector.close()

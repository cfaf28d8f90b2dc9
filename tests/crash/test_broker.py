"""A broker that dies, repeats itself, or has saved up messages: nothing lost, doubled or late because of it."""

from __future__ import annotations

from tests.crash.cases import find
from tests.crash.conftest import Survives


def test_broker_killed_with_its_queue_saved_loses_nothing(survives: Survives) -> None:
    survives(find("broker killed, its queue saved", "worker too"))


def test_broker_killed_without_its_queue_loses_that_and_nothing_else(survives: Survives) -> None:
    verdict = survives(find("broker killed, its queue not saved"))

    assert any("the broker lost" in note for note in verdict.notes)


def test_broker_whose_queue_is_too_short_drops_the_rest_and_nothing_else(survives: Survives) -> None:
    verdict = survives(find("broker's queue too short"))

    assert any("the broker dropped" in note for note in verdict.notes)


def test_every_message_published_twice_counts_once(survives: Survives) -> None:
    survives(find("every message published twice", "a worker killed meanwhile"))


def test_messages_queued_for_ten_minutes_of_outage_are_not_late(survives: Survives) -> None:
    survives(find("ten minutes of messages after an outage"))

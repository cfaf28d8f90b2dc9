"""A worker is killed or frozen inside a send to MQTT: all cases of these are in the matrix, some of them here."""

from __future__ import annotations

from functools import partial

import pytest

from tests.crash.cases.mqtt_sinks import broker_restarted, in_send
from tests.crash.conftest import Survives
from tests.crash.world import Case


@pytest.mark.parametrize(("point", "qos"), [("before", 1), ("published", 1), ("answered", 2), ("acknowledged", 1)])
def test_a_kill_in_a_send_loses_nothing_and_repeats_at_most_one_send_under_known_ids(
    survives: Survives, point: str, qos: int
) -> None:
    survives(Case("SIGKILL in a send to MQTT", point, partial(in_send, point=point, qos=qos, number=400)))


def test_a_frozen_owner_publishes_nothing_after_another_has_taken_over(survives: Survives) -> None:
    survives(Case("SIGSTOP in a send to MQTT", "", partial(in_send, point="answered", frozen=True, number=400)))


def test_a_broker_that_is_restarted_gets_everything(survives: Survives) -> None:
    survives(Case("MQTT broker restarted, with a sink", "", broker_restarted))

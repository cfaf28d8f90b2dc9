"""Mutants of the MQTT sink."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LINK = "millpy/sinks/mqtt/link.py"
PUBLISHER = "millpy/sinks/mqtt/publisher.py"
BROKER = "tests/conformance/test_mqtt_sink.py::"
ALONE = "tests/unit/test_mqtt_sink.py::"
KILL = "test_a_kill_in_a_send_loses_nothing_and_repeats_at_most_one_send_under_known_ids"

MUTANTS = [
    Mutant(
        PUBLISHER,
        "/{messages.positions[place]}",
        "/{place}",
        killers=(f"tests/crash/test_mqtt_sinks.py::{KILL}[acknowledged-1]",),
        line="MQTT: no message is lost, and what a fault repeats has its known id",
    ),
    Mutant(
        LINK,
        "        if not progress.left:\n",
        "        if progress.left == len(progress.on_way):\n",
        killers=(f"{BROKER}test_a_frozen_broker_is_given_up",),
        line="MQTT: a message counts as delivered when the broker has acknowledged it, never before",
    ),
    Mutant(
        "millpy/sinks/mqtt/send_progress.py",
        "                self._waiting[key].append(place)\n",
        "                self._ready.append(place)\n",
        killers=(f"{ALONE}test_messages_of_a_key_leave_in_order_and_never_past_a_refused_one",),
        line="MQTT: the messages of a key leave in order, and none overtakes a refused one",
    ),
    Mutant(
        "millpy/sinks/mqtt/topic.py",
        'f"interval {setup.number}"',
        'f"interval {id(setup)}"',
        killers=(f"{BROKER}test_a_new_owner_ends_the_connection_of_the_one_before",),
        line="MQTT: an earlier owner of an interval publishes nothing after another has connected",
    ),
    Mutant(
        LINK,
        "        if answer.code < REFUSED_MIN:\n",
        "        if answer.code <= 0xFF:\n",
        killers=(f"{BROKER}test_a_topic_without_rights_refuses_its_messages_and_no_others",),
        line="MQTT: a message that the broker does not take stops no other key",
    ),
    Mutant(
        PUBLISHER,
        "        blames = error.code in BLAMES_A_MESSAGE\n",
        "        blames = False\n",
        killers=(f"{BROKER}test_a_broker_that_ends_connections_at_large_messages_refuses_only_those",),
        line="MQTT: a message that the broker does not take stops no other key",
    ),
    Mutant(
        LINK,
        "min(on_way_max, self.limits.receive_max)",
        "on_way_max",
        killers=(f"{BROKER}test_no_more_are_on_their_way_than_the_broker_allows",),
    ),
    Mutant(
        LINK,
        "            raise self._end()  # while nothing was on its way\n",
        "            pass\n",
        killers=(f"{BROKER}test_a_new_owner_ends_the_connection_of_the_one_before",),
    ),
    Mutant(
        "millpy/sinks/mqtt/template.py",
        '    if not text or "/" in text:\n',
        "    if not text:\n",
        killers=(f"{ALONE}test_a_record_that_no_broker_takes_is_a_dead_letter_and_the_others_leave",),
    ),
]

"""Mutants of sources: the records that an intake accepts and counts, and the acknowledgements to brokers."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

INTAKE = "millpy/ingest/intake.py"
DISORDER = "millpy/ingest/disorder.py"
INBOX = "millpy/sources/mqtt/inbox.py"
INJECTOR = "millpy/sources/mqtt/injector.py"
PACKETS = "millpy/sources/mqtt/packets.py"
REDELIVERY = "millpy/sources/mqtt/redelivery.py"
MQTT = "millpy/sources/mqtt/source.py"
OF_INTAKE = ("tests/unit/ingest/test_intake.py",)
OF_DISORDER = ("tests/unit/ingest/test_disorder.py", "tests/property/test_disorder.py")
NO_IDS = ("tests/unit/ingest/test_intake.py::test_record_whose_id_is_none_is_never_a_duplicate",)
OF_INBOX = ("tests/unit/sources/test_mqtt_inbox.py",)
OF_ORDER = ("tests/conformance/test_mqtt_order.py",)
OF_MQTT = "tests/conformance/test_mqtt.py::"
OF_REDELIVERY = "tests/conformance/test_mqtt_redelivery.py::"

MUTANTS = [
    Mutant(DISORDER, "        watermarks = np.maximum(before - of_row, watermark)\n",
           "        watermarks = before - of_row\n", OF_INTAKE),
    Mutant(DISORDER, "            np.maximum.accumulate(watermarks, out=watermarks)", "            pass", OF_DISORDER),
    Mutant(DISORDER, "        self._filled = int(self._block.sum())\n", "        self._filled = 0\n", OF_DISORDER),
    Mutant(DISORDER, "if total * (1 - self._percentile) < BEYOND_MIN * UNIT:", "if not total:", OF_DISORDER),
    Mutant(INTAKE, "        return watermarks[:-1]", "        return watermarks[1:]", OF_INTAKE),
    Mutant(INTAKE, "        happened = np.minimum(times, arrived_at)\n        before", "        happened = times\n        before", OF_INTAKE),
    Mutant(INTAKE, "        future = times > latest\n", "        future = times > latest + 1_000_000_000\n", OF_INTAKE),
    Mutant(INTAKE, "        accepted = fresh & timed & ~future\n", "        accepted = fresh & timed\n", OF_INTAKE),
    Mutant(INTAKE, "            accepted &= ~unordered\n", "            pass\n", OF_INTAKE),
    Mutant(INTAKE, "        fresh[letters.judged] = ~duplicates\n", "        pass\n", OF_INTAKE),
    Mutant(INTAKE, "            timed &= ~future\n", "            pass\n", OF_INTAKE),
    Mutant(INTAKE, '        self._counts["duplicate"] += duplicates\n', "        pass\n", OF_INTAKE),
    Mutant(INTAKE, '        self._counts["dead_lettered"] += len(letters)\n', "        pass\n", OF_INTAKE),
    Mutant(INTAKE, "        if clock.elapsed_us - self._quiet_since < idle.after_us:",
           "        if clock.elapsed_us - self._quiet_since < 0:", OF_INTAKE),
    Mutant(INTAKE, "        if arrived or not quiet:\n            self._quiet_since = None\n",
           "        if arrived or not quiet:\n            pass\n", OF_INTAKE),
    Mutant(INTAKE, "        self._state(INSTANT_MAX)\n", "", OF_INTAKE),
    Mutant(INTAKE, "            self._advance(recovered.low_watermark)\n", "            pass\n", OF_INTAKE),
    Mutant(INTAKE, "recovered.low_watermark > self._source.watermark:", "True:", OF_DISORDER),
    Mutant(INBOX, '    """Append a run."""\n        self.packet_ids += run.packet_ids\n',
           '    """Append a run."""\n        self.packet_ids += run.packet_ids[:1]\n', OF_INBOX),
    Mutant(INBOX, "            if committed:\n", "            if False:\n",
           (f"{OF_REDELIVERY}test_nothing_counts_twice_after_a_connection_was_lost_before_the_acknowledgement",),
           line="A message that the broker sends again because a worker died"),
    Mutant(INBOX, "            if committed is None:\n                break\n", "",
           (f"{OF_REDELIVERY}test_nothing_counts_twice_after_a_connection_was_lost_during_a_commit", *OF_INBOX)),
    Mutant(INBOX, "                self.received -= len(run)\n", "", OF_INBOX),
    Mutant(INBOX, '% (topic, payload), packet_id)', '% (topic, payload))',
           (f"{OF_REDELIVERY}test_equal_message_in_flight_is_not_mistaken_for_a_redelivery", *OF_INBOX)),
    Mutant(REDELIVERY, "            if sent.committed and over:\n", "            if sent.committed:\n",
           ("tests/unit/sources/test_mqtt_redelivery.py",)),
    Mutant(REDELIVERY, "        return False if committed is None else committed or None\n", "        return bool(committed)\n",
           ("tests/unit/sources/test_mqtt_redelivery.py",)),
    Mutant(REDELIVERY, "self._bytes() > self._bytes_max", "False", ("tests/unit/sources/test_mqtt_redelivery.py",)),
    Mutant(PACKETS, "            if first & _DUP and packet_id:", "            if first & _DUP:",
           ("tests/unit/sources/test_mqtt_packets.py",)),
    Mutant(INBOX, "        for index in [*sorted(special), len(published)]:", "        for index in sorted(special):", OF_INBOX),
    Mutant(INBOX, "topic.startswith(_MARKERS) or not self._topics.fullmatch(topic)}", "topic.startswith(_MARKERS)}", OF_INBOX),
    Mutant(INBOX, "        if not self._retained:\n", "        if self._retained:\n", OF_INBOX),
    Mutant(INJECTOR, "        token = _Token(session, bundle.packet_ids, sent)\n",
           "        session.connection.acknowledge(bundle.packet_ids)\n"
           "        token = _Token(session, bundle.packet_ids, sent)\n",
           (f"{OF_MQTT}test_nothing_is_acknowledged_before_the_commit",),
           line="MQTT: a message is acknowledged after the commit, never before"),
    Mutant(INJECTOR, "        if session is self._session:\n            session.connection.acknowledge(token.packet_ids)\n", "",
           (f"{OF_MQTT}test_only_unacknowledged_messages_are_redelivered",)),
    Mutant(INJECTOR, "            if not self._setup.trusted():\n                continue\n", "",
           (f"{OF_MQTT}test_injector_never_connects_under_an_untrusted_grant",)),
    Mutant(INJECTOR, "        session.outstanding.append(token)\n", "        session.outstanding.appendleft(token)\n",
           ("tests/conformance/test_mqtt_order.py::test_a_message_without_records_waits_for_what_came_before_it",)),
    Mutant(INJECTOR, "        return session.drained and session.silence.answers(now)\n", "        return True\n",
           (f"{OF_MQTT}test_source_is_not_quiet_before_its_marker_has_returned",)),
    Mutant(INJECTOR, "                    delay_s = limits.lease_ttl_s\n", "                    pass\n",
           (f"{OF_MQTT}test_two_deployments_with_one_client_id_do_not_disconnect_each_other_in_a_loop",),
           line="One source partition has one reader"),
    Mutant(MQTT, '    ending = blake2b(partition.encode(), key=secret.encode(), digest_size=16).hexdigest()\n',
           '    ending = blake2b(partition.encode(), digest_size=16).hexdigest()\n',
           ("tests/conformance/test_session_names.py::test_a_device_cannot_guess_a_session_name_to_end_it",)),
    Mutant("millpy/runtime/turn.py", "        await context.failpoints.reach(Failpoint.BEFORE_COMMIT)\n",
           "        for injector, token in turn.tokens:\n            await injector.acknowledge(token)\n"
           "        await context.failpoints.reach(Failpoint.BEFORE_COMMIT)\n",
           ("tests/crash/test_sources.py::test_messages_of_an_uncommitted_turn_are_redelivered",)),
    Mutant("millpy/sources/kafka/injector.py", "        self._position = KafkaPosition(after, self._position.begun, self._topic_id)\n",
           "        self._position = KafkaPosition(after + 1, self._position.begun, self._topic_id)\n",
           ("tests/conformance/test_kafka.py::test_reading_continues_at_every_committed_offset",
            "tests/crash/test_sources.py::test_offsets_of_an_uncommitted_turn_are_read_again"),
           line="Files and Kafka: the position is part of the commit"),
    Mutant("millpy/sources/kafka/client.py", "        self._topic_id = topic_id\n", "        self._topic_id = None\n",
           ("tests/conformance/test_kafka.py::test_topic_made_again_stops_the_source_though_it_has_the_offset",)),
    Mutant(INJECTOR, "        if self.outstanding:\n            self.outstanding[-1]", "        if False:\n            self.outstanding[-1]",
           OF_ORDER),
    Mutant(INJECTOR, "self.outstanding[-1].packet_ids.extend", "self.outstanding[0].packet_ids.extend", OF_ORDER),
    Mutant("millpy/ingest/dedupe.py",
           "        return np.array([all(read(o) is not None for read in reads) for o in objects], bool)",
           "        return np.ones(len(objects), bool)", NO_IDS, line="Without ids there is no deduplication"),
    Mutant("millpy/ingest/dedupe.py",
           "            known &= column_of(batch, name).is_valid().to_numpy(zero_copy_only=False)", "            pass", NO_IDS),
]  # fmt: skip

"""The MQTT injector against a real broker, and against amqtt for MQTT 3.1.1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from millpy import Login, Mqtt, MqttSession
from millpy.embedded import EmbeddedBroker
from millpy.errors import ConfigError
from millpy.limits import Limits
from millpy.sources.mqtt.inbox import MARKER_PREFIX
from tests.conformance.mqtt_subject import (
    SettledBroker,
    an_injector,
    publish,
    take,
    take_payloads,
    until,
    until_quiet,
)

READ_BYTES = 1 << 18
"""asyncio reads at most this from a socket at once."""
IMPATIENT = Limits(lease_ttl_s=0.5, retry_s_min=0.01, retry_s_max=0.01)
"""A connection that ends soon after it began is tried again after a lease."""


async def test_messages_arrive_in_order_with_their_topic(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port)
    await injector.open(None)

    await publish(broker.port, [b"%d" % i for i in range(50)])

    taken = await take(injector)
    found = [*taken.payloads, *await take_payloads(injector, 50 - len(taken.payloads))]
    assert found == [b"%d" % i for i in range(50)]
    assert taken.describe(0).startswith("sensors/a ")
    await injector.close()


async def test_nothing_is_acknowledged_before_the_commit(broker: EmbeddedBroker) -> None:
    first = an_injector(broker.port)
    await first.open(None)
    await publish(broker.port, [b"1", b"2", b"3"])
    assert await take_payloads(first, 3) == [b"1", b"2", b"3"]
    await first.close()

    second = an_injector(broker.port)
    await second.open(None)

    assert await take_payloads(second, 3) == [b"1", b"2", b"3"]
    await second.close()


async def test_only_unacknowledged_messages_are_redelivered(broker: EmbeddedBroker) -> None:
    first = an_injector(broker.port)
    await first.open(None)
    await publish(broker.port, [b"1", b"2"])
    done = 0
    while done < 2:
        taken = await take(first)
        done += len(taken.payloads)
        await first.acknowledge(taken.token)
    await publish(broker.port, [b"3", b"4"])
    await take_payloads(first, 2)
    await first.close()

    second = an_injector(broker.port)
    await second.open(None)

    assert await take_payloads(second, 2) == [b"3", b"4"]
    await second.close()


async def test_token_of_a_lost_connection_acknowledges_nothing(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, limits=IMPATIENT)
    await injector.open(None)
    await publish(broker.port, [b"1"])
    old = await take(injector)
    session = injector._session
    assert session is not None
    session.connection.mark_lost("cut by the test")
    again = await take(injector)

    await injector.acknowledge(old.token)
    await injector.close()

    assert list(again.payloads) == [b"1"]
    last = an_injector(broker.port)
    await last.open(None)
    assert await take_payloads(last, 1) == [b"1"]
    await last.close()


async def test_injector_reconnects_to_a_killed_broker_and_loses_nothing(quick_broker: EmbeddedBroker) -> None:
    injector = an_injector(quick_broker.port, limits=IMPATIENT)
    await injector.open(None)
    await publish(quick_broker.port, [b"first", b"second"])
    await take_payloads(injector, 2)
    await asyncio.to_thread(quick_broker.save)  # mosquitto saves by itself what it queues, not what is in flight

    quick_broker.kill()
    await until(injector, lambda: injector._session is None)
    assert not injector.quiet()
    quick_broker.start()

    assert await take_payloads(injector, 2) == [b"first", b"second"]
    await publish(quick_broker.port, [b"third"])
    assert await take_payloads(injector, 1) == [b"third"]
    await injector.close()


async def test_injector_waits_for_a_broker_that_has_not_started(broker: EmbeddedBroker) -> None:
    broker.stop()
    injector = an_injector(broker.port)
    await injector.open(None)
    assert await injector.take() is None

    broker.start()
    await until(injector, lambda: injector._session is not None)
    await publish(broker.port, [b"1"])

    assert await take_payloads(injector, 1) == [b"1"]
    await injector.close()


async def test_source_is_quiet_only_after_its_backlog_was_read(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port)
    await injector.open(None)
    await injector.close()
    await publish(broker.port, [b"%d" % i for i in range(20)])

    injector = an_injector(broker.port, limits=Limits(bundle_records_max=5))
    await injector.open(None)
    early = injector.quiet()
    found = []
    while len(found) < 20:
        assert not injector.quiet()
        found += (await take(injector)).payloads
    await until_quiet(injector)

    assert not early
    assert found == [b"%d" % i for i in range(20)]
    await injector.close()


async def test_source_is_not_quiet_before_its_marker_has_returned(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port)

    await injector.open(None)  # nothing is queued, and nothing has proven that yet

    assert not injector.quiet()
    await until_quiet(injector)
    await injector.close()


async def test_marker_is_not_a_record_even_under_a_filter_for_all_topics(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, filter="#")
    await injector.open(None)
    await until_quiet(injector)

    await publish(broker.port, [b"other"], topic=MARKER_PREFIX + "somebody")
    await publish(broker.port, [b"1"])

    assert (await take(injector)).payloads == [b"1"]
    await injector.close()


async def test_markers_do_not_accumulate_in_the_session(broker: EmbeddedBroker) -> None:
    for _ in range(3):
        injector = an_injector(broker.port)
        await injector.open(None)
        await until_quiet(injector)
        await injector.close()

    injector = an_injector(broker.port)
    await injector.open(None)
    session = injector._session
    assert session is not None
    await until(injector, lambda: len(session.inbox) > 0)
    await until_quiet(injector)

    assert len(session.outstanding) == 0
    await injector.close()


@pytest.mark.parametrize("protocol", [5, 311])
async def test_retained_messages_are_ignored_by_default(broker: EmbeddedBroker, protocol: int) -> None:
    await publish(broker.port, [b"old"], retain=True)
    injector = an_injector(broker.port, protocol=protocol)
    await injector.open(None)

    await publish(broker.port, [b"new"])

    assert await take_payloads(injector, 1) == [b"new"]
    await injector.close()
    keen = an_injector(broker.port, protocol=protocol, retained=True, session=MqttSession(client_id=f"keen-{protocol}"))
    await keen.open(None)
    assert await take_payloads(keen, 1) == [b"old"]
    await keen.close()


async def test_injector_never_connects_under_an_untrusted_grant(broker: EmbeddedBroker) -> None:
    trust, asked = [True], [0]

    def trusted() -> bool:
        asked[0] += 1
        return trust[0]

    injector = an_injector(broker.port, trusted=trusted, limits=IMPATIENT)
    await injector.open(None)
    trust[0] = False

    broker.kill()
    await until(injector, lambda: injector._session is None)
    broker.start()
    other = an_injector(broker.port)
    await other.open(None)
    await until_quiet(other)  # no other client takes its session over
    before = asked[0]
    async with asyncio.timeout(60):
        while asked[0] < before + 3:  # noqa: ASYNC110 - each time it could have connected
            await asyncio.sleep(0)

    assert injector._session is None
    await other.close()
    trust[0] = True
    await until(injector, lambda: injector._session is not None)
    await injector.close()


async def test_injector_does_not_fight_for_a_session_taken_over(broker: EmbeddedBroker) -> None:
    first, second = an_injector(broker.port), an_injector(broker.port)
    await first.open(None)

    await second.open(None)
    await until(first, lambda: first._session is None)
    await publish(broker.port, [b"1"])

    assert await take_payloads(second, 1) == [b"1"]
    assert second._session is not None
    await first.close()
    await second.close()


@pytest.mark.parametrize("protocol", [5, 311])
async def test_two_deployments_with_one_client_id_do_not_disconnect_each_other_in_a_loop(
    broker: EmbeddedBroker, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(lease_ttl_s=60, retry_s_min=0.01, retry_s_max=0.01)
    rivals = [an_injector(broker.port, protocol=protocol, limits=limits) for _ in range(2)]
    for rival in rivals:
        await rival.open(None)

    # Each has been kicked out once and waits for a lease, or one has and the other stays.
    await until(rivals[0], lambda: "waiting for a lease" in caplog.text)
    for _ in range(20):
        await publish(broker.port, [b"1"])  # a round trip to the broker, while nothing else happens

    assert (broker.directory / "broker.log").read_text().count("closing old connection") <= 2
    assert "client_id=" in next(
        vars(record)["hint"] for record in caplog.records if "waiting for a lease" in record.message
    )
    for rival in rivals:
        await rival.close()


async def test_stopped_broker_is_not_called_another_client(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limits = Limits(lease_ttl_s=60, retry_s_min=0.01, retry_s_max=0.01)
    with EmbeddedBroker(tmp_path) as stopping:
        injector = an_injector(stopping.port, limits=limits)
        await injector.open(None)
        stopping.stop()
        await until(injector, lambda: injector._session is None)
        connection = injector._setup.connection
        await until(injector, lambda: "waiting for a lease" in caplog.text)

    (record,) = [record for record in caplog.records if "waiting for a lease" in record.message]
    assert "nothing listens" in vars(record)["hint"]
    assert connection.is_connected is False
    assert connection.why.endswith("was lost: the broker closed it")
    await injector.close()


async def test_reading_stops_beyond_two_bundles_and_drops_nothing(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, limits=Limits(bundle_records_max=10))
    await injector.open(None)
    await until_quiet(injector)
    session = injector._session
    assert session is not None

    await publish(broker.port, [b"%d" % i for i in range(200)])

    assert len(session.inbox) <= 20
    assert await take_payloads(injector, 200) == [b"%d" % i for i in range(200)]
    await injector.close()


@pytest.mark.parametrize("protocol", [5, 311])
async def test_backlog_is_not_read_before_the_subscription_is_answered(tmp_path: Path, protocol: int) -> None:
    # The broker sends it as soon as the session is back, and its answer to our subscription behind that.
    limits = Limits(bundle_bytes_max=100_000, record_bytes_max=20_000)
    payloads = [b"%d " % i + b"x" * 10_000 for i in range(150)]
    with SettledBroker(tmp_path, []) as broker:
        injector = an_injector(broker.port, limits=limits, protocol=protocol)
        await injector.open(None)
        await injector.close()
        await publish(broker.port, payloads)

        for attempt in range(2):  # also when it was read and not acknowledged
            injector = an_injector(broker.port, limits=limits, protocol=protocol)
            await injector.open(None)
            session = injector._session
            assert session is not None
            found: list[bytes] = []
            while len(found) < len(payloads):
                assert session.inbox.bytes <= 2 * limits.bundle_bytes_max + READ_BYTES + 20_000
                assert not injector.quiet()
                found += (await take(injector)).payloads
            assert found == payloads
            if attempt == 0:
                await injector.close()

        await until_quiet(injector)
        await publish(broker.port, [b"later"])
        assert await take_payloads(injector, 1) == [b"later"]
        await injector.close()


async def test_connection_survives_a_pause_longer_than_the_keepalive(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, limits=Limits(bundle_records_max=5), session=MqttSession(keepalive_s=1))
    await injector.open(None)
    await until_quiet(injector)
    session = injector._session
    assert session is not None
    await publish(broker.port, [b"%d" % i for i in range(50)])
    await until(injector, lambda: session._paused)

    losing = asyncio.create_task(session.connection.lost())
    # Neither the library, which hears no answer to its pings, nor the broker, which hangs up at one and a half.
    await asyncio.wait([losing], timeout=4)

    assert not losing.done()
    losing.cancel()
    assert await take_payloads(injector, 50) == [b"%d" % i for i in range(50)]
    await injector.close()


async def test_handover_repeats_nothing_that_was_acknowledged(quick_broker: EmbeddedBroker) -> None:
    # A broker that saves itself at each acknowledgement may take longer for 300 of them than a leaving client waits.
    first = an_injector(quick_broker.port)
    await first.open(None)
    await publish(quick_broker.port, [b"%d" % i for i in range(300)])
    taken = []
    while sum(len(one.payloads) for one in taken) < 300:
        taken.append(await take(first))
    for one in taken:
        await first.acknowledge(one.token)
    await first.close()

    second = an_injector(quick_broker.port)
    await second.open(None)
    await until_quiet(second)  # whose `take` is always empty

    await second.close()


async def test_closing_after_the_broker_has_died_is_no_error(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, limits=IMPATIENT)
    await injector.open(None)
    await publish(broker.port, [b"1"])
    taken = await take(injector)

    broker.kill()
    await injector.acknowledge(taken.token)
    await injector.close()

    assert injector._session is None


async def test_oversized_message_is_one_dead_letter_and_the_feed_continues(broker: EmbeddedBroker) -> None:
    limits = Limits(record_bytes_max=1_000, bundle_bytes_max=100_000)
    injector = an_injector(broker.port, limits=limits)
    await injector.open(None)

    await publish(broker.port, [b"[" * 5_000, b"x" * 500_000, b"small"])
    found = await take_payloads(injector, 3)

    assert [len(payload) for payload in found] == [5_000, 1_001, 5]
    assert all(len(payload) > limits.record_bytes_max for payload in found[:2]), "which the decoder calls oversized"
    await injector.close()


async def test_array_is_acknowledged_once_and_redelivered_whole(broker: EmbeddedBroker) -> None:
    first = an_injector(broker.port, limits=Limits(bundle_records_max=2))
    await first.open(None)
    await publish(broker.port, [b'[{"a":1},{"a":2},{"a":3}]'])
    taken = await take(first)
    assert list(taken.payloads) == [b'{"a":1}', b'{"a":2}', b'{"a":3}']
    assert taken.describe(2).endswith(")[2]")
    await first.close()

    second = an_injector(broker.port)
    await second.open(None)
    again = await take(second)
    await second.acknowledge(again.token)
    await second.close()

    assert again.payloads == taken.payloads
    third = an_injector(broker.port)
    await third.open(None)
    await until_quiet(third)
    await third.close()


async def test_messages_of_a_former_filter_are_not_records(
    broker: EmbeddedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    before = an_injector(broker.port, filter="old/#", session=MqttSession(client_id="mine"))
    await before.open(None)
    await before.close()
    injector = an_injector(broker.port, filter="new/#", session=MqttSession(client_id="mine"))
    await injector.open(None)

    await publish(broker.port, [b"1"], topic="old/a")
    await publish(broker.port, [b"2"], topic="new/a")

    assert (await take(injector)).payloads == [b"2"]
    assert "topic 'old/a', which does not match filter 'new/#'" in caplog.text
    await injector.close()


async def test_bad_password_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "nobody").write_text("")
    with SettledBroker(tmp_path / "broker", [f"password_file {tmp_path / 'nobody'}"], anonymous=False) as broker:
        injector = an_injector(broker.port, login=Login("u", "secret"), limits=Limits(retry_s_max=0.1))

        with pytest.raises(ConfigError, match="refuses user 'u'") as caught:
            await injector.open(None)

        assert "secret" not in f"{caught.value} {caught.value.hint} {injector._address!r}"
        await injector.close()


async def test_broker_that_refuses_the_login_for_a_while_is_an_outage(tmp_path: Path) -> None:
    # The worker ended, and neither a supervisor nor systemd starts it again after a mistake of configuration: a broker
    # that was started again, and knew its users a minute later, stopped the plant.
    with SettledBroker(tmp_path / "broker", []) as broker:
        injector = an_injector(broker.port, limits=Limits(retry_s_max=0.1, lease_ttl_s=0.5))
        state = injector._setup.connection
        await injector.open(None)

        async def starts_again(*, anonymous: bool, shows: Callable[[], bool]) -> None:
            broker.stop()
            broker._anonymous = anonymous
            broker.start()
            async with asyncio.timeout(60):
                while not shows():
                    assert await injector.take() is None
                    await asyncio.sleep(0)

        await starts_again(anonymous=False, shows=lambda: "without a user" in state.why and state.attempts > 1)
        await injector.close()  # as after a turn that has failed: this worker opens its source again
        injector = Mqtt("sensors/#", host="127.0.0.1", port=broker.port).connect(injector._setup)
        await injector.open(None)
        await starts_again(anonymous=True, shows=lambda: state.is_connected is True)
        await publish(broker.port, [b"1"])

        assert await take_payloads(injector, 1) == [b"1"]
        await injector.close()


async def test_mqtt_3_1_1_on_mosquitto_loses_nothing_either(broker: EmbeddedBroker) -> None:
    first = an_injector(broker.port, protocol=311)
    await first.open(None)
    await publish(broker.port, [b"1", b"2"])
    taken = await take(first)
    await first.acknowledge(taken.token)
    await first.close()
    await publish(broker.port, [b"3"])

    second = an_injector(broker.port, protocol=311)
    await second.open(None)

    rest = await take_payloads(second, 3 - len(taken.payloads))
    assert [*taken.payloads, *rest] == [b"1", b"2", b"3"]
    await second.close()


async def test_source_works_with_amqtt(tmp_path: Path) -> None:
    pytest.importorskip("amqtt")
    broker = EmbeddedBroker(tmp_path)
    broker.program = None
    broker.start()
    injector = an_injector(broker.port, protocol=311)
    await injector.open(None)

    await publish(broker.port, [b"1", b"2"])
    found: list[bytes] = []
    while len(found) < 2:
        taken = await take(injector)
        found += taken.payloads
        await injector.acknowledge(taken.token)
    await until_quiet(injector)

    assert found == [b"1", b"2"]
    await injector.close()
    broker.kill()

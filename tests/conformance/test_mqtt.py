"""The MQTT injector against a real broker, and against amqtt for MQTT 3.1.1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import aiomqtt
import pytest

from millpy.clock import SystemClock
from millpy.embedded import EmbeddedBroker
from millpy.errors import ConfigError
from millpy.injectors.mqtt import MARKER_PREFIX, Mqtt, MqttInjector
from millpy.injectors.protocol import SourceSetup, Taken
from millpy.limits import Limits


def an_injector(
    port: int,
    *,
    filter: str = "sensors/#",
    trusted: Callable[[], bool] = lambda: True,
    limits: Limits | None = None,
    **how: object,
) -> MqttInjector:
    setup = SourceSetup(
        graph="g", stream="s", partition=filter, limits=limits or Limits(), clock=SystemClock(), ready=asyncio.Event(),
        trusted=trusted,
    )  # fmt: skip
    return Mqtt(filter, host="127.0.0.1", port=port, **how).connect(setup)


async def publish(port: int, payloads: Sequence[bytes], topic: str = "sensors/a", **how: object) -> None:
    async with aiomqtt.Client("127.0.0.1", port) as client:
        for payload in payloads:
            await client.publish(topic, payload, qos=1, **how)


async def take(injector: MqttInjector) -> Taken:
    async with asyncio.timeout(20):
        while (taken := await injector.take()) is None:
            injector._setup.ready.clear()
            await injector._setup.ready.wait()
        return taken


async def take_payloads(injector: MqttInjector, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        found += (await take(injector)).payloads
    return found


async def until(injector: MqttInjector, claim: Callable[[], bool]) -> None:
    """Wait for a claim that changes only when the injector wakes us."""
    async with asyncio.timeout(20):
        while not claim():
            await injector._setup.ready.wait()
            injector._setup.ready.clear()


async def until_quiet(injector: MqttInjector) -> None:
    async with asyncio.timeout(20):
        while not injector.quiet():
            assert await injector.take() is None
            if not injector.quiet():
                await injector._setup.ready.wait()
                injector._setup.ready.clear()


async def test_messages_come_in_order_and_name_their_topic(broker: EmbeddedBroker) -> None:
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


async def test_acknowledged_messages_do_not_come_again_and_the_others_do(broker: EmbeddedBroker) -> None:
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
    injector = an_injector(broker.port)
    await injector.open(None)
    await publish(broker.port, [b"1"])
    old = await take(injector)
    session = injector._session
    assert session is not None
    session.connection._paho._sock_close()
    session.connection._client._disconnected.set_result(None)
    again = await take(injector)

    await injector.acknowledge(old.token)
    await injector.close()

    assert list(again.payloads) == [b"1"]
    last = an_injector(broker.port)
    await last.open(None)
    assert await take_payloads(last, 1) == [b"1"]
    await last.close()


async def test_injector_finds_a_killed_broker_again_and_loses_nothing(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port)
    await injector.open(None)
    await publish(broker.port, [b"first", b"second"])
    await take_payloads(injector, 2)
    saved = broker.directory / "mosquitto.db"  # mosquitto writes it a moment after it has answered the publisher
    async with asyncio.timeout(20):
        while not (saved.exists() and b"second" in saved.read_bytes()):  # noqa: ASYNC110
            await asyncio.sleep(0)

    broker.kill()
    await until(injector, lambda: injector._session is None)
    assert not injector.quiet()
    broker.start()

    assert await take_payloads(injector, 2) == [b"first", b"second"]
    await publish(broker.port, [b"third"])
    assert await take_payloads(injector, 1) == [b"third"]
    await injector.close()


async def test_injector_waits_for_a_broker_that_is_not_there_yet(broker: EmbeddedBroker) -> None:
    broker.stop()
    injector = an_injector(broker.port)
    await injector.open(None)
    assert await injector.take() is None

    broker.start()
    await until(injector, lambda: injector._session is not None)
    await publish(broker.port, [b"1"])

    assert await take_payloads(injector, 1) == [b"1"]
    await injector.close()


async def test_source_is_quiet_only_after_its_backlog_was_taken(broker: EmbeddedBroker) -> None:
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


async def test_marker_is_no_record_even_under_a_filter_for_everything(broker: EmbeddedBroker) -> None:
    injector = an_injector(broker.port, filter="#")
    await injector.open(None)
    await until_quiet(injector)

    await publish(broker.port, [b"other"], topic=MARKER_PREFIX + "somebody")
    await publish(broker.port, [b"1"])

    assert (await take(injector)).payloads == [b"1"]
    await injector.close()


async def test_markers_do_not_pile_up_in_the_session(broker: EmbeddedBroker) -> None:
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
async def test_retained_messages_are_old_news(broker: EmbeddedBroker, protocol: int) -> None:
    await publish(broker.port, [b"old"], retain=True)
    injector = an_injector(broker.port, protocol=protocol)
    await injector.open(None)

    await publish(broker.port, [b"new"])

    assert await take_payloads(injector, 1) == [b"new"]
    await injector.close()
    keen = an_injector(broker.port, protocol=protocol, retained=True, client_id=f"keen-{protocol}")
    await keen.open(None)
    assert await take_payloads(keen, 1) == [b"old"]
    await keen.close()


async def test_untrusted_grant_never_connects(broker: EmbeddedBroker) -> None:
    trust = [True]
    injector = an_injector(broker.port, trusted=lambda: trust[0], limits=Limits(retry_s_min=0.01, retry_s_max=0.01))
    await injector.open(None)
    trust[0] = False

    broker.kill()
    await until(injector, lambda: injector._session is None)
    broker.start()
    other = an_injector(broker.port)
    await other.open(None)
    await until_quiet(other)  # nobody takes the session away from it

    assert injector._session is None
    await other.close()
    trust[0] = True
    await until(injector, lambda: injector._session is not None)
    await injector.close()


async def test_session_taken_over_is_not_fought_for(broker: EmbeddedBroker) -> None:
    first, second = an_injector(broker.port), an_injector(broker.port)
    await first.open(None)

    await second.open(None)
    await until(first, lambda: first._session is None)
    await publish(broker.port, [b"1"])

    assert await take_payloads(second, 1) == [b"1"]
    assert second._session is not None
    await first.close()
    await second.close()


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


async def test_bad_password_is_a_setting_to_fix(broker: EmbeddedBroker) -> None:
    broker.stop()
    (broker.directory / "nobody").write_text("")
    command = [*broker._command()]
    text = Path(command[-1]).read_text().replace("allow_anonymous true", "allow_anonymous false")
    text += f"password_file {broker.directory / 'nobody'}\n"
    strict = broker.directory / "strict.conf"
    strict.write_text(text)
    process = await asyncio.create_subprocess_exec(*command[:-1], str(strict), stderr=asyncio.subprocess.DEVNULL)
    injector = an_injector(broker.port, username="u", password="p", limits=Limits(retry_s_max=0.1))

    with pytest.raises(ConfigError, match="refuses user"):
        await injector.open(None)
        await take(injector)

    await injector.close()
    process.kill()
    await process.wait()


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


async def test_amqtt_as_a_broker(tmp_path: Path) -> None:
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

"""TLS, logins and the doctor at a real Kafka broker, with certificates made here."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaConsumer
from aiokafka.conn import AIOKafkaConnection
from aiokafka.errors import KafkaConnectionError, TopicAuthorizationFailedError

from millpy import EventTime, Graph, Kafka, KafkaBrokers, Sasl, Tls, seconds
from millpy.admin.doctor_sources import examine_sources
from millpy.clock import SystemClock
from millpy.errors import ConfigError, SinkUnavailableError, SourceUnavailableError
from millpy.model.finding import Finding, Severity
from millpy.sinks.kafka.topic import KafkaTopic
from millpy.sinks.messages import SinkMessages
from millpy.sinks.protocol import SinkSetup
from millpy.sources.kafka.client import Client, _answers
from tests.conformance.test_kafka import Feed, values
from tests.kafka_server import PASSWORD, USER, KafkaServer
from tests.kafka_topics import Operation, committed_messages, grant, make_topic

_numbers = itertools.count(1)


class Reading(msgspec.Struct):
    device: str
    at: float


@pytest_asyncio.fixture(autouse=True)
async def _all_is_closed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """The client library does not wait for the good-byes of TLS; sockets would outlive the test's loop."""
    closing: set[asyncio.Future[None]] = set()
    close = AIOKafkaConnection.close

    def remembered(connection: AIOKafkaConnection, *arguments: Any, **options: Any) -> asyncio.Future[None]:
        closed: asyncio.Future[None] = close(connection, *arguments, **options)
        closing.add(closed)
        return closed

    monkeypatch.setattr(AIOKafkaConnection, "close", remembered)
    yield
    if closing:
        await asyncio.wait(closing, timeout=60)
    for _ in range(3):  # after a failed handshake no peer is left to wait for
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def secured(kafka: KafkaServer) -> KafkaServer:
    kafka.make_scram_user()
    return kafka


@pytest.fixture
def account(secured: KafkaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a service; return the file with the password."""
    path = tmp_path / "password"
    path.write_text(PASSWORD + "\n")
    monkeypatch.setenv("MILLPY_KAFKA_SERVERS", secured.login)
    monkeypatch.setenv("MILLPY_KAFKA_USERNAME", USER)
    monkeypatch.setenv("MILLPY_KAFKA_PASSWORD_FILE", str(path))
    return path


async def connected(source: Kafka) -> int:
    """How many partitions the topic has, once we are in."""
    client = Client(source.cluster(), source.topic, 0, "test")
    try:
        await client.start()
        return (await client.topic()).partitions
    finally:
        await client.stop()


@pytest.mark.parametrize("sasl", ["PLAIN", "SCRAM-SHA-512"])
async def test_records_are_read_over_tls_with_a_login(secured: KafkaServer, account: Path, sasl: str) -> None:
    feed = await Feed(secured).make()
    await feed.send(*range(200))

    async with feed.reader(brokers=KafkaBrokers(sasl=Sasl(mechanism=sasl), tls=Tls(ca=secured.authority))) as reader:
        assert values(await reader.records(200)) == list(range(200))


async def test_broker_without_a_trusted_certificate_is_refused_at_once(kafka: KafkaServer) -> None:
    with pytest.raises(ConfigError, match="is not trusted") as refused:
        await connected(Kafka("readings", partitions=1, brokers=KafkaBrokers(kafka.tls, tls=True)))

    assert "Tls(ca=" in refused.value.hint


async def test_broker_under_another_name_is_refused(kafka: KafkaServer) -> None:
    elsewhere = kafka.tls.replace("127.0.0.1", "localhost")

    with pytest.raises(ConfigError, match="not valid for 'localhost'"):
        await connected(Kafka("readings", partitions=1, brokers=KafkaBrokers(elsewhere, tls=Tls(ca=kafka.authority))))


@pytest.mark.parametrize("sasl", ["PLAIN", "SCRAM-SHA-512"])
async def test_wrong_password_is_reported_and_not_shown(
    secured: KafkaServer, account: Path, sasl: str, caplog: pytest.LogCaptureFixture
) -> None:
    account.write_text("other-" + PASSWORD)

    with pytest.raises(ConfigError, match=f"refuses user '{USER}' with {sasl}") as refused, caplog.at_level("DEBUG"):
        await connected(
            Kafka(
                "readings", partitions=1, brokers=KafkaBrokers(sasl=Sasl(mechanism=sasl), tls=Tls(ca=secured.authority))
            )
        )

    assert "MILLPY_KAFKA_PASSWORD" in refused.value.hint
    assert PASSWORD not in f"{refused.value} {refused.value.hint} {caplog.text}"


@pytest.mark.parametrize(("what", "words"), [("login", "refuses"), ("rights", "refuses"), ("file", "cannot read")])
async def test_broker_that_refuses_a_login_or_rights_for_a_while_is_an_outage(
    secured: KafkaServer, account: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    # It ended the worker with status 2, after which nothing starts it again; a password that was replaced was not read.
    feed = await Feed(secured).make()
    async with feed.reader(brokers=KafkaBrokers(sasl=Sasl(), tls=Tls(ca=secured.authority))) as reader:
        state = reader.setup.connection

        async def getmany(*_: Any, **__: Any) -> Any:
            raise TopicAuthorizationFailedError if what == "rights" else KafkaConnectionError("the broker restarts")

        with monkeypatch.context() as refusing:
            refusing.setattr(AIOKafkaConsumer, "getmany", getmany)
            if what == "login":
                account.write_text("other")
            elif what == "file":
                account.unlink()
            while words not in state.why:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(9):
                await asyncio.sleep(0)
            await reader.injector.take()  # raised the refusal
            await reader.injector.close()  # as after a turn that has failed: this worker opens its source again
            reader.injector = reader.injector._source.connect(reader.setup)
            if what == "rights":
                account.write_text("other")
            await reader.injector.open(None)
            assert state.is_connected is False
        account.write_text(PASSWORD)
        await feed.send(1)

        assert values(await reader.records(1)) == [1]


async def test_a_sink_that_may_not_store_its_position_names_the_right(secured: KafkaServer, account: Path) -> None:
    """The position is an offset of the topic: Kafka asks for Read, too. The sink had an unexpected error for ever."""
    topic = f"rights-{next(_numbers)}"
    await make_topic(secured.address, topic)
    sink = KafkaTopic(topic, brokers=KafkaBrokers(sasl=Sasl(), tls=Tls(ca=secured.authority)))

    async def send_one() -> None:
        connection = sink.connect(SinkSetup("plant", topic, 0, 1, 1, SystemClock()))
        try:
            await connection.open()
            await connection.send(SinkMessages(0, [b"d"], [b"1"], [0]))
        finally:
            await connection.close()

    await grant(secured.address, topic, USER, Operation.WRITE)
    await grant(secured.address, topic, USER, Operation.DESCRIBE)
    with pytest.raises(SinkUnavailableError, match="TopicAuthorizationFailed") as refused:
        await send_one()
    assert "grant the user Read, Write and Describe" in str(refused.value.hint)
    await grant(secured.address, topic, USER, Operation.READ)
    await send_one()
    assert [message.value for message in await committed_messages(secured.address, topic, [0])] == [b"1"]


async def test_unexpected_kind_of_login_is_named(kafka: KafkaServer, account: Path) -> None:
    with pytest.raises(ConfigError, match="does not support SCRAM-SHA-256"):
        await connected(
            Kafka(
                "readings",
                partitions=1,
                brokers=KafkaBrokers(sasl=Sasl(mechanism="SCRAM-SHA-256"), tls=Tls(ca=kafka.authority)),
            )
        )


async def test_login_at_a_broker_without_logins_is_refused(
    kafka: KafkaServer, account: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPY_KAFKA_SERVERS", kafka.tls)

    with pytest.raises(ConfigError, match="accepts no login"):
        await connected(Kafka("readings", partitions=1, brokers=KafkaBrokers(tls=Tls(ca=kafka.authority))))


@pytest.mark.parametrize(
    ("port", "tls", "words"),
    [
        ("address", True, "closes the connection"),
        ("tls", False, "closes the connection"),
        ("login", True, "does not answer"),
    ],
)
async def test_port_with_another_protocol_gets_a_hint(kafka: KafkaServer, port: str, tls: bool, words: str) -> None:
    source = Kafka(
        "readings",
        partitions=1,
        brokers=KafkaBrokers(getattr(kafka, port), tls=Tls(ca=kafka.authority) if tls else False),
    )

    with pytest.raises(SourceUnavailableError, match=words) as silent:
        await connected(source)

    assert "TLS" in silent.value.hint


async def test_closed_port_and_unknown_host_are_distinguished() -> None:
    with pytest.raises(SourceUnavailableError, match=r"nothing listens at 127\.0\.0\.1:1"):
        await connected(Kafka("readings", partitions=1, brokers=KafkaBrokers("127.0.0.1:1")))
    with pytest.raises(SourceUnavailableError, match=r"cannot resolve host nowhere\.invalid:1"):
        await connected(Kafka("readings", partitions=1, brokers=KafkaBrokers("nowhere.invalid:1")))


async def test_a_broker_that_does_not_answer_in_time_comes_with_something_to_do(kafka: KafkaServer) -> None:
    """`millpy doctor` and a worker's log show the hint: it was empty when a broker was frozen."""
    client = Client(
        Kafka("readings", partitions=1, brokers=KafkaBrokers(kafka.address)).cluster(), "readings", 0, "test"
    )
    try:
        await client.start()
        with pytest.raises(SourceUnavailableError, match="did not answer") as late:
            async with _answers(0):
                await client.topic()
    finally:
        await client.stop()

    assert "check that the brokers run" in str(late.value.hint)


@pytest.mark.parametrize("text", [None, "nothing"])
def test_file_without_a_certificate_authority_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "ca.pem"
    if text is not None:
        file.write_text(text)

    with pytest.raises(ConfigError, match=r"ca\.pem"):
        Kafka("readings", partitions=1, brokers=KafkaBrokers(tls=Tls(ca=file))).cluster().options()


def test_unsupported_login_is_refused_when_the_source_is_created() -> None:
    with pytest.raises(ConfigError, match="'SCRAM'"):
        Sasl(mechanism="SCRAM")


async def finding(source: Kafka) -> Finding:
    graph = Graph("plant")
    graph.inject("readings", source, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(1)))
    async with asyncio.timeout(60):
        (found,) = await examine_sources(graph)
    return found


@pytest.mark.parametrize(
    ("there", "severity"), [(0, Severity.ERROR), (1, Severity.ERROR), (2, Severity.OK), (3, Severity.WARNING)]
)
async def test_the_doctor_compares_partitions_with_those_of_the_topic(
    kafka: KafkaServer, there: int, severity: Severity
) -> None:
    topic = f"doctor-{next(_numbers)}"
    if there:
        await make_topic(kafka.address, topic, there)

    brokers = KafkaBrokers(kafka.address)
    found = await finding(Kafka(topic, partitions=2, new_partitions="report", brokers=brokers))

    assert found.severity is severity
    assert f"has {there} partitions, 2 are read" in found.found


async def test_the_doctor_tells_why_a_broker_refuses_the_login(secured: KafkaServer, account: Path) -> None:
    account.write_text("other")

    found = await finding(Kafka("readings", partitions=1, brokers=KafkaBrokers(tls=Tls(ca=secured.authority))))

    assert found.severity is Severity.ERROR
    assert f"refuses user '{USER}'" in found.found
    assert "MILLPY_KAFKA_PASSWORD" in found.action

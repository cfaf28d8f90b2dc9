"""Secrets come from the environment or from files, go where they belong, and are shown nowhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict
from typer.testing import CliRunner

from millpy import Kafka, KafkaBrokers, Login, Mqtt, MqttTopic, Sasl, SchemaRegistry, Webhook
from millpy.cli.app import app
from millpy.clock import SystemClock
from millpy.config.database_url import complete
from millpy.config.secrets import is_other_machine, secret
from millpy.config.settings import Settings
from millpy.errors import ConfigError
from millpy.ingest.protocol import SourceSetup
from millpy.limits import Limits
from millpy.sources.http.address import listen_address
from millpy.sources.kafka.client import Cluster
from millpy.sources.mqtt.address import BrokerAddress, url_of_environment

SECRET = "hunter2-tOp"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text(f"{SECRET}\n")
    return str(path)


def test_a_secret_is_read_from_its_variable_or_its_file(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    assert secret("MILLPY_TRY") is None
    monkeypatch.setenv("MILLPY_TRY_FILE", file)
    assert secret("MILLPY_TRY") == SECRET
    monkeypatch.delenv("MILLPY_TRY_FILE")
    monkeypatch.setenv("MILLPY_TRY", "nearer")
    assert secret("MILLPY_TRY") == "nearer"


@pytest.mark.parametrize("content", [None, "", "\n", b"\xff\xfe"])
def test_a_file_that_holds_no_secret_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | bytes | None
) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setenv("MILLPY_TRY_FILE", str(path))

    with pytest.raises(ConfigError, match=f"MILLPY_TRY_FILE: .*{path}"):
        secret("MILLPY_TRY")


def test_the_password_of_a_file_completes_the_url(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setenv("MILLPY_DATABASE_URL", "postgresql://me@localhost:5433/plant")
    monkeypatch.setenv("MILLPY_DATABASE_PASSWORD_FILE", file)

    settings = Settings.load()

    assert conninfo_to_dict(settings.database_url or "") == {
        "host": "localhost", "port": "5433", "user": "me", "dbname": "plant", "password": SECRET
    }  # fmt: skip
    assert SECRET not in repr(settings) + str(settings)
    assert (
        Settings.load(database_url="postgresql://me:own@localhost/x").database_url == "postgresql://me:own@localhost/x"
    )


def test_the_whole_url_may_be_in_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("postgresql://localhost/plant\n")
    monkeypatch.setenv("MILLPY_DATABASE_URL_FILE", str(path))

    assert Settings.load().database_url == "postgresql://localhost/plant"


@pytest.mark.parametrize(
    "url", ["postgresql:///plant", "postgresql://localhost/plant", "host=127.0.0.2", "host=/run/pg"]
)
def test_local_connections_are_not_encrypted(url: str) -> None:
    assert complete(url) == url


@pytest.mark.parametrize(
    "url", ["postgresql://me@db.example/plant", "host=10.0.0.7", "postgresql://localhost,db/plant"]
)
def test_certificate_and_name_of_another_machine_are_verified_by_default(url: str) -> None:
    parts = conninfo_to_dict(complete(url))

    assert parts["sslmode"] == "verify-full"
    assert parts["sslrootcert"]


@pytest.mark.parametrize(
    "url", ["postgresql://db.example/plant?sslmode=disable", "host=db.example sslmode=require", "service=plant"]
)
def test_tls_settings_of_the_user_are_kept(url: str) -> None:
    assert complete(url) == url


def test_tls_settings_of_the_environment_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSSLMODE", "verify-ca")

    assert complete("postgresql://db.example/plant") == "postgresql://db.example/plant"


def test_authorities_of_the_user_are_kept(tmp_path: Path) -> None:
    parts = conninfo_to_dict(complete("postgresql://db.example/plant?sslrootcert=ours.pem"))

    assert (parts["sslmode"], parts["sslrootcert"]) == ("verify-full", "ours.pem")


@pytest.mark.parametrize(
    ("host", "other"),
    [("localhost", False), ("127.9.9.9", False), ("::1", False), ("", False), ("/run", False), ("db", True)],
)
def test_addresses_are_local_or_remote(host: str, other: bool) -> None:
    assert is_other_machine(host) is other


def test_password_of_the_broker_is_read_from_a_file(monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    monkeypatch.setenv("MILLPY_MQTT_URL", "mqtts://me@broker.example")
    monkeypatch.setenv("MILLPY_MQTT_PASSWORD_FILE", file)

    url = url_of_environment()

    assert url.password == SECRET
    assert SECRET not in repr(url)


def test_reprs_of_addresses_show_no_password() -> None:
    cluster = Cluster("broker:9093", "me", SECRET, tls=True)
    sources = (
        Mqtt("a", host="b", login=Login("me", SECRET)),
        Kafka("a", partitions=1, brokers=KafkaBrokers(sasl=Sasl("me", SECRET))),
    )

    assert SECRET not in "".join(map(repr, (cluster, *sources)))
    assert "password" not in {field for field, shown in _shown(BrokerAddress).items() if shown}


def _shown(kind: Any) -> dict[str, bool]:
    return {name: field.repr for name, field in kind.__dataclass_fields__.items()}


@pytest.mark.parametrize(
    ("arguments", "tls"),
    [
        ({"host": "broker.example", "login": Login("me", SECRET)}, True),
        ({"host": "broker.example", "login": Login("me", SECRET), "tls": False}, False),
        ({"host": "broker.example"}, False),
        ({"host": "localhost", "login": Login("me", SECRET)}, False),
    ],
)
def test_a_password_is_sent_to_a_remote_broker_only_encrypted(arguments: dict[str, Any], tls: bool) -> None:
    setup = SourceSetup(
        graph="g", stream="s", partition="readings", limits=Limits(), clock=SystemClock(), ready=asyncio.Event()
    )

    assert Mqtt("readings", **arguments).address(setup).tls is tls
    assert MqttTopic("readings", **arguments).address("id").tls is tls


@pytest.mark.parametrize(
    ("arguments", "protocol"),
    [
        ({"servers": "kafka.example:9093", "username": "me"}, "SASL_SSL"),
        ({"servers": "kafka.example:9093", "username": "me", "tls": False}, "SASL_PLAINTEXT"),
        ({"servers": "localhost:9092,kafka.example:9093", "username": "me"}, "SASL_SSL"),
        ({"servers": "localhost:9092", "username": "me"}, "SASL_PLAINTEXT"),
        ({"servers": "kafka.example"}, "PLAINTEXT"),
        ({"servers": "kafka.example:9093", "tls": True}, "SSL"),
    ],
)
def test_settings_for_aiokafka_follow_tls_and_login(arguments: dict[str, Any], protocol: str) -> None:
    arguments = dict(arguments)
    sasl = Sasl(arguments.pop("username", None), SECRET, "SCRAM-SHA-512")
    source = Kafka("readings", partitions=1, brokers=KafkaBrokers(sasl=sasl, **arguments))

    options = source.cluster().options()

    assert options["security_protocol"] == protocol
    if "SASL" in protocol:
        assert options["sasl_mechanism"] == "SCRAM-SHA-512"
        assert (options["sasl_plain_username"], options["sasl_plain_password"]) == ("me", SECRET)
    if "SSL" in protocol:
        assert options["ssl_context"].check_hostname
        assert options["ssl_context"].verify_mode.name == "CERT_REQUIRED"


COMMANDS = (
    ("status",), ("watermarks",), ("doctor", "--json"), ("migrate",), ("migrate", "--roles"), ("fleet",),
    ("dead-letters", "list"), ("late", "list", "--json"), ("parked", "list"), ("sources", "resume", "g", "s"),
)  # fmt: skip
TORN = (
    f"postgresql://me:{SECRET}@127.0.0.1:1/plant",  # no server listens
    f"postgresql://me:a@{SECRET}@127.0.0.1/plant",
    f"postgresql://me:a/{SECRET}@127.0.0.1/plant",
    f"postgresql://me:1/{SECRET}@127.0.0.1/plant",
    f"postgresql://me:a?{SECRET}@127.0.0.1/plant",
    f"postgresql://me:{SECRET}%zz@127.0.0.1/plant",
    f"postgresql://me:{SECRET}:1@127.0.0.1:1:2/plant",
    f"host=127.0.0.1 password={SECRET} {SECRET}",
    f"mysql://me:{SECRET}@127.0.0.1/plant",
    f"{SECRET}",
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_command_shows_a_password_when_it_cannot_connect(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for url in TORN:
        monkeypatch.setenv("MILLPY_DATABASE_URL", url)
        result = CliRunner().invoke(app, list(command))

        assert result.exit_code != 0, (command, url)
        assert result.exception is None or isinstance(result.exception, SystemExit), (command, url)
        assert SECRET not in result.output, result.output


@pytest.mark.parametrize("host", [".plant", "broker..plant", "b" * 64 + ".plant"])
def test_a_host_that_the_system_cannot_be_asked_for_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an empty variable leaves it: `mqtt://$SITE.plant`. Looking it up raises UnicodeError."""
    monkeypatch.setenv("MILLPY_MQTT_URL", f"mqtt://{host}:1883")
    monkeypatch.setenv("MILLPY_INGEST_URL", f"http://{host}:8081")
    monkeypatch.setenv("MILLPY_SCHEMA_REGISTRY_URL", f"https://{host}")
    monkeypatch.setenv("MILLPY_KAFKA_SERVERS", f"one:9092,{host}:9092")
    for use in (
        url_of_environment,
        lambda: Mqtt("readings", host=host),
        lambda: MqttTopic("alerts", host=host),
        lambda: listen_address(None),
        lambda: SchemaRegistry().address(),
        lambda: Kafka("readings", partitions=1).cluster(),
        lambda: Kafka("readings", partitions=1, brokers=KafkaBrokers(servers=f"{host}:9092")).cluster(),
        lambda: Webhook(f"https://{host}/alerts"),
        lambda: Webhook(url_field="url", hosts=[host]),
    ):
        with pytest.raises(ConfigError) as raised:
            use()
        assert raised.value.hint, raised.value


@pytest.mark.parametrize("password", ["se/cret", "se?cret", "se#cret", "12/cret", "12?cret", "12#cret", "[cret"])
def test_an_address_that_its_password_splits_is_refused_without_it(
    password: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPY_SCHEMA_REGISTRY_URL", f"http://me:{password}@registry:8081")
    monkeypatch.setenv("MILLPY_KAFKA_SERVERS", f"one:9092,me:{password}@broker:9092")
    for use in (
        lambda: SchemaRegistry().address(),
        lambda: SchemaRegistry(url=f"https://me:{password}@registry"),
        lambda: Kafka("readings", partitions=1).cluster(),
    ):
        with pytest.raises(ConfigError) as raised:
            use()
        assert "cret" not in f"{raised.value} {raised.value.hint}".replace("secret", "")

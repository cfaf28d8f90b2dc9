"""Kafka as a source: each Kafka partition is a source partition, and our commits store its offset.

So nothing is acknowledged at the broker: after a crash the next owner resumes at the committed offset, exactly once,
without a consumer group. Records of aborted transactions are invisible.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from millpy.config.access import Tls, files_of, text_of
from millpy.config.addresses import is_host_name
from millpy.config.extras import to_install
from millpy.config.secrets import goes_elsewhere, hosts_of, secret
from millpy.errors import ConfigError
from millpy.formats import Format, Message
from millpy.formats.message import checked_format
from millpy.ingest.protocol import Injector, Source, SourceSetup
from millpy.limits import KEY_INTERVALS_MAX
from millpy.model.arguments import check_texts, is_whole
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sources.kafka.records import FieldMapping, Tombstones

if TYPE_CHECKING:
    from millpy.sources.kafka.client import Cluster

SERVERS_VARIABLE = "MILLPY_KAFKA_SERVERS"
USERNAME_VARIABLE, PASSWORD_VARIABLE = "MILLPY_KAFKA_USERNAME", "MILLPY_KAFKA_PASSWORD"
SASL = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
Start = Literal["earliest", "latest"] | datetime


@dataclass(frozen=True, slots=True)
class Sasl:
    """A login at Kafka's brokers.

    Attributes:
        username: the user name; by default MILLPY_KAFKA_USERNAME.
        password: the password; by default MILLPY_KAFKA_PASSWORD, or the file that MILLPY_KAFKA_PASSWORD_FILE names. It
            appears in no repr, log line or error.
        mechanism: "PLAIN", "SCRAM-SHA-256" or "SCRAM-SHA-512".
    """

    username: str | None = None
    password: str | None = field(default=None, repr=False)
    mechanism: str = "PLAIN"

    def __post_init__(self) -> None:
        check_texts('for example sasl=Sasl("me", secret)', username=self.username, password=self.password)
        if self.mechanism not in SASL:
            raise ConfigError(f"unsupported SASL mechanism {self.mechanism!r}", hint=f"choose one of {', '.join(SASL)}")


@dataclass(frozen=True, slots=True)
class KafkaBrokers:
    """The brokers of a cluster, and how to reach them.

    Attributes:
        servers: their addresses, `host:9092,other:9092`; by default the environment variable MILLPY_KAFKA_SERVERS, else
            localhost:9092. The environment's login belongs to the environment's brokers.
        sasl: our login; by default that of the environment.
        tls: whether to encrypt, and to verify the brokers' certificates and names; `Tls(ca=…)` names the authorities to
            trust instead of the system's. By default True if a password would go to another machine.
    """

    servers: str | None = None
    sasl: Sasl = Sasl()
    tls: Tls | bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.servers, str | None):
            raise ConfigError(f"servers={self.servers!r} is not text", hint='for example "one:9092,two:9092"')
        if not isinstance(self.sasl, Sasl):
            raise ConfigError("sasl is not a Sasl", hint='for example sasl=Sasl("me", "secret", "SCRAM-SHA-512")')
        if files_of(self.tls).certificate is not None:
            raise ConfigError("millpy cannot log in to Kafka by certificate", hint="log in with sasl=Sasl(…)")


NO_FIELDS = FieldMapping()
DEFAULT_BROKERS = KafkaBrokers()


def check_brokers(brokers: object) -> None:
    """Check the `brokers=` of a source or a sink. Raises ConfigError."""
    if not isinstance(brokers, KafkaBrokers):
        hint = 'for example brokers=KafkaBrokers("one:9092,two:9092")'
        raise ConfigError(f"brokers is not a KafkaBrokers, but a {type(brokers).__name__}", hint=hint)


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Kafka(Source):
    """The records of a topic; by default each value is one JSON record.

    The repr and the identity leave out the brokers' addresses, the credentials, and what only says how to read.

    Args:
        topic: the topic's name.
        partitions: the number of the topic's partitions, at least those to read.
        fields: the fields of a record that its key, headers and timestamp fill; by default none.
        start: where to begin a partition without a committed offset: "earliest", "latest" or a datetime. A partition
            that is created later always begins at its beginning, also with "latest".
        tombstones: the treatment of records without a value: "dead_letter", "skip", or "record" (an object with only
            key, headers and timestamp).
        lost: the reaction when the committed offset is gone: "stop", or "continue" at the oldest offset, with an event.
        new_partitions: what to do about partitions beyond `partitions`: "read" them, once the first partition is read,
            or only "report" them.
        brokers: the brokers' addresses, our login and TLS; by default those of the environment.
        format: the payload format of values, such as `MessagePack()`; by default each value is one JSON record.
        decode: instead of a format, a function from a `Message` to its records.
    """

    topic: str
    count: int
    fields: FieldMapping
    start: Start
    tombstones: Tombstones
    lost: Literal["stop", "continue"]
    new_partitions: Literal["read", "report"]
    brokers: KafkaBrokers
    format: Format | None

    def __init__(  # noqa: PLR0913 - what a user may say of a feed
        self,
        topic: str,
        *,
        partitions: int,
        fields: FieldMapping = NO_FIELDS,
        start: Start = "earliest",
        tombstones: Tombstones = "dead_letter",
        lost: Literal["stop", "continue"] = "stop",
        new_partitions: Literal["read", "report"] = "read",
        brokers: KafkaBrokers = DEFAULT_BROKERS,
        format: Format | None = None,
        decode: Callable[[Message], Iterable[Any]] | None = None,
    ) -> None:
        if not isinstance(topic, str) or not topic or not is_whole(partitions, 1, KEY_INTERVALS_MAX):
            raise ConfigError(
                f"Kafka needs a topic and its number of partitions, 1 to {KEY_INTERVALS_MAX:,}, not {partitions!r}",
                hint='an example: Kafka("readings", partitions=4)',
            )
        if tombstones not in ("dead_letter", "skip", "record"):
            raise ConfigError(
                f"unknown value tombstones={tombstones!r}", hint='choose "dead_letter", "skip" or "record"'
            )
        if lost not in ("stop", "continue"):
            raise ConfigError(f"unknown value lost={lost!r}", hint='choose "stop" or "continue"')
        if new_partitions not in ("read", "report"):
            raise ConfigError(f"unknown value new_partitions={new_partitions!r}", hint='choose "read" or "report"')
        if not (start in ("earliest", "latest") or (isinstance(start, datetime) and start.tzinfo is not None)):
            raise ConfigError(
                f"unknown value start={start!r}", hint='choose "earliest", "latest" or a datetime with a time zone'
            )
        if not isinstance(fields, FieldMapping):
            raise ConfigError(
                f"fields is not a FieldMapping: {fields!r}", hint='for example fields=FieldMapping(key="device")'
            )
        check_brokers(brokers)
        values = {
            "topic": topic, "count": partitions, "fields": fields, "start": start, "tombstones": tombstones,
            "lost": lost, "new_partitions": new_partitions, "brokers": brokers,
            "format": checked_format(format, decode),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the topic and the records that it becomes; the number of partitions may grow."""
        found = {
            "kind": "kafka",
            "topic": self.topic,
            "fields": self.fields.identity(),
            "tombstones": self.tombstones,
        }
        return found if self.format is None else {**found, "format": self.format.identity()}

    def payload_format(self) -> Format | None:
        """Return `format`."""
        return self.format

    def partitions(self) -> tuple[str, ...]:
        """Return one source partition for each Kafka partition."""
        return tuple(map(self.partition, range(self.count)))

    def partition(self, number: int) -> str:
        """Name the source partition of a Kafka partition."""
        return f"{self.topic}/{number}"

    def validate(self, record_type: RecordType) -> None:
        """Check that the fields can be filled. Raises GraphError."""
        self.fields.validate(record_type, self.format)
        if self.format is not None:
            self.format.validate(record_type)

    def begins_at(self) -> str:
        """Name the time by which `start=` and `--from` look up a position."""
        return "the record's timestamp"

    def examine(self, graph: str, stream: str) -> AsyncIterator[Finding]:
        """Check the cluster, and compare the partitions with the topic's. Raises MillError."""
        from millpy.sources.kafka.examination import examine

        return examine(self, graph, stream)

    def connect(self, setup: SourceSetup) -> Injector:
        """Return the injector of one partition, not yet connected.

        Raises:
            ConfigError: the package aiokafka is missing.
        """
        try:
            from millpy.sources.kafka.injector import KafkaInjector  # an optional dependency
        except ImportError as error:
            raise _without_package() from error
        return KafkaInjector(setup, self)

    def cluster(self) -> Cluster:
        """Return the addresses and credentials, as given here or else by the environment.

        Raises:
            ConfigError: the package aiokafka is missing, a host is none, or a file with the password cannot be read.
        """
        try:
            from millpy.sources.kafka.client import Cluster  # an optional dependency
        except ImportError as error:
            raise _without_package() from error
        brokers, sasl = self.brokers, self.brokers.sasl
        ours = brokers.servers is None  # credentials belong to the address that they were given with
        servers = brokers.servers or os.environ.get(SERVERS_VARIABLE) or "localhost:9092"
        if not all(map(is_host_name, hosts_of(servers))):
            raise ConfigError(  # without what is there: it may hold a password
                f"{SERVERS_VARIABLE if ours else 'servers='} has something that is no name of a host",
                hint='for example "one:9092,two:9092"',
            )
        username = sasl.username or (os.environ.get(USERNAME_VARIABLE) if ours else None)
        chosen = brokers.tls is not None
        return Cluster(
            servers=servers,
            username=username,
            password=sasl.password or (secret(PASSWORD_VARIABLE) if ours else None),
            sasl=sasl.mechanism,
            tls=brokers.tls is not False if chosen else username is not None and goes_elsewhere(servers),
            ca_file=text_of(files_of(brokers.tls).ca),
        )


def _without_package() -> ConfigError:
    return ConfigError("Kafka needs the package aiokafka", hint=to_install("kafka"))

"""Records that applications inject in their own transactions: `SELECT millpy.inject('orders', …)`."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from millpy.errors import ConfigError, GraphError
from millpy.formats.message import check_field
from millpy.ingest.protocol import Injector, Source, SourceSetup
from millpy.model.arguments import is_whole
from millpy.model.identity import Identity
from millpy.model.record import RecordType

WAITING_MAX = 1_000_000
STREAM_BYTES_MAX = 200


@dataclass(frozen=True, slots=True)
class InjectedStream(Source):
    """The records that `millpy.inject(stream, record)` adds in any transaction of the workers' database.

    A record exists if, and only if, its transaction commits. Records of transactions that wait for each other, because
    they change the same row, come in the order of their commits. The identity has the stream and the field.

    Attributes:
        stream: the name that is given to `millpy.inject`. Several graphs may read the same stream.
        id_field: the field of a record (str or UUID) that gets the third argument of `millpy.inject`, where it is
            given, for `Dedupe`; None: the argument is ignored.
        waiting_max: the number of waiting records, 1 to 1,000,000,000, from which `millpy.inject` raises an error. It
            bounds what is stored while no worker runs.
    """

    stream: str
    id_field: str | None = None
    waiting_max: int = WAITING_MAX

    def __post_init__(self) -> None:
        size = len(self.stream.encode()) if isinstance(self.stream, str) else 0
        if not 1 <= size <= STREAM_BYTES_MAX or "\0" in self.stream:
            raise ConfigError(
                f"InjectedStream needs the name of a stream of 1 to {STREAM_BYTES_MAX} bytes, not {self.stream!r}",
                hint='an example: InjectedStream("orders")',
            )
        if not is_whole(self.waiting_max, 1, 1_000_000_000):
            raise ConfigError(
                f"waiting_max={self.waiting_max!r} is not a number of records", hint="choose 1 to 1,000,000,000"
            )

    def identity(self) -> Identity:
        """Describe the stream; where the records wait is no part of it, nor is how many may."""
        found: dict[str, str | None] = {"kind": "injected_stream", "stream": self.stream}
        return found if self.id_field is None else {**found, "id_field": self.id_field}

    def partitions(self) -> tuple[str, ...]:
        """Return one source partition: commits of one database have one order."""
        return (self.stream,)

    def validate(self, record_type: RecordType) -> None:
        """Check that `id_field` exists and holds text. Raises GraphError."""
        if self.id_field is None:
            return
        if check_field(record_type, self.id_field, "id_field=") not in (str, UUID):
            raise GraphError(f"id_field={self.id_field!r} is filled from millpy.inject and must be str or UUID")
        struct = record_type.struct
        if struct.__struct_config__.array_like:
            raise GraphError(
                f"fields filled from millpy.inject do not fit {struct.__name__}, which is written as an array",
                hint="remove array_like=True from the class",
            )

    def connect(self, setup: SourceSetup) -> Injector:
        """Return the injector, not yet connected.

        Raises:
            ConfigError: there is no database.
        """
        from millpy.sources.postgres.injected_reader import InjectedReader  # psycopg takes long to import

        if not setup.database:
            raise ConfigError(
                f"InjectedStream({self.stream!r}) is read by workers only", hint="run the graph with `millpy run`"
            )
        return InjectedReader(setup, self)

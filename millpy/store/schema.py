"""The tables of schema `mill` as SQLAlchemy sees them: what administrative queries may use.

The migrations are the truth; tests/conformance/test_schema.py holds this equal to a freshly migrated database.
Partitions of the rings, functions and views are only in the migrations.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSON, JSONB, TIMESTAMP, UUID

metadata = MetaData(schema="mill")
_BEGINNING = text("'-4611686018427387904'::bigint")
_END = text("'4611686018427387904'::bigint")


def _identity(name: str, kind: type[Integer] = Integer) -> Column[int]:
    return Column(name, kind, Identity(always=True), primary_key=True)


def _graph() -> Column[int]:
    return Column("graph_id", Integer, ForeignKey("mill.graphs.graph_id", ondelete="CASCADE"), nullable=False)


def _computation(name: str) -> Column[int]:
    target = ForeignKey("mill.computations.computation_id", ondelete="CASCADE")
    return Column(name, Integer, target, nullable=False)


def _stream() -> Column[int]:
    return Column("stream_id", Integer, ForeignKey("mill.streams.stream_id", ondelete="CASCADE"), nullable=False)


def _text(name: str, *, nullable: bool = False) -> Column[str]:
    return Column(name, Text, nullable=nullable)


def _bigint(name: str, *, nullable: bool = False, default: object = None, key: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable, server_default=default, primary_key=key, autoincrement=False)  # type: ignore[arg-type]


def _moment(name: str, default: object = None, *, nullable: bool = False) -> Column[object]:
    return Column(name, TIMESTAMP(timezone=True), nullable=nullable, server_default=default)  # type: ignore[arg-type]


REQUESTED = "state = 'requested'"
SETTLED = "state = ANY (ARRAY['replayed'::text, 'discarded'::text])"


def _settling() -> tuple[Column[object], ...]:
    """How often a replay has failed, and what a person has said about what was set aside."""
    return (
        Column("attempts", Integer, nullable=False, server_default=text("0")),
        Column("state", Text, nullable=False, server_default=text("'set_aside'::text")),
        _moment("state_at", func.now()),
    )


def _slot() -> Column[int]:
    return Column("slot", SmallInteger, primary_key=True, autoincrement=False)


graphs = Table(
    "graphs",
    metadata,
    _identity("graph_id"),
    Column("name", Text, nullable=False, unique=True),
    _text("family"),
    Column("generation", Integer, nullable=False),
    Column("version", Integer, nullable=False, server_default=text("1")),
    _text("fingerprint"),
    Column("description", JSONB, nullable=False),
    _moment("deployed_at", func.now()),
    Column("secret", UUID(as_uuid=True), nullable=False, server_default=func.gen_random_uuid()),
    UniqueConstraint("family", "generation"),
    CheckConstraint("generation > 0"),
    CheckConstraint("name IN (family, family || '_' || generation)"),
)

computations = Table(
    "computations",
    metadata,
    _identity("computation_id"),
    _graph(),
    _text("name"),
    _text("kind"),
    Column("place", Integer, nullable=False),
    UniqueConstraint("graph_id", "name"),
    CheckConstraint("kind IN ('injector', 'stage')"),
)

schemas = Table(
    "schemas",
    metadata,
    _identity("schema_id"),
    Column("encoded", LargeBinary, nullable=False),
    Column("digest", Text, nullable=False, unique=True),
)

streams = Table(
    "streams",
    metadata,
    _identity("stream_id"),
    _graph(),
    _text("name"),
    _computation("producer_id"),
    Column("schema_id", Integer, ForeignKey("mill.schemas.schema_id"), nullable=False),
    UniqueConstraint("graph_id", "name"),
)

subscriptions = Table(
    "subscriptions",
    metadata,
    _identity("subscription_id", BigInteger),
    _graph(),
    _stream(),
    _computation("consumer_id"),
    Column("input", Integer, nullable=False),
    Column("key_fields", ARRAY(Text), nullable=False),
    UniqueConstraint("stream_id", "consumer_id", "input"),
)

result_tables = Table(
    "result_tables",
    metadata,
    _identity("table_id"),
    _graph(),
    _text("name"),
    _text("kind"),
    _computation("computation_id"),
    _stream(),
    Column("key_columns", JSONB, nullable=False),
    Column("value_columns", JSONB, nullable=False),
    _bigint("allowed_lateness_us"),
    UniqueConstraint("graph_id", "name"),
    CheckConstraint("kind IN ('windowed', 'records')"),
)

roles = Table(
    "roles",
    metadata,
    Column("alone", Boolean, primary_key=True, server_default=text("true")),
    _text("owner"),
    _text("worker"),
    _text("reader"),
    CheckConstraint("alone"),
)

workers = Table(
    "workers",
    metadata,
    Column("worker_id", UUID, primary_key=True),
    _graph(),
    Column("graph_version", Integer, nullable=False),
    Column("computations", ARRAY(Text), nullable=False),
    _text("host"),
    Column("pid", Integer, nullable=False),
    Column("backend_pid", Integer),
    _moment("backend_start", nullable=True),
    _moment("registered_at", func.clock_timestamp()),
    _moment("lease_deadline"),
    Column("lease_s", Double, nullable=False, server_default=text("5")),
)

intervals = Table(
    "intervals",
    metadata,
    _identity("interval_id", BigInteger),
    _graph(),
    _computation("computation_id"),
    Column("place", Integer, nullable=False),
    _bigint("key_lo", nullable=True),
    _bigint("key_hi", nullable=True),
    Column("source_partition", Text, nullable=False, server_default=""),
    Column("joined", Boolean, nullable=False, server_default=text("false")),
    Column("worker_id", UUID),
    _bigint("sequencer", default=text("0")),
    Column("graph_version", Integer, nullable=False),
    _bigint("bundle", default=text("0")),
    _bigint("folded_bundle", default=text("0")),
    _bigint("input_watermark", default=_BEGINNING),
    _bigint("low_watermark", default=_BEGINNING),
    _bigint("oldest_work", default=_END),
    _bigint("processing_floor", default=_BEGINNING),
    UniqueConstraint("computation_id", "place"),
)

cursors = Table(
    "cursors",
    metadata,
    _bigint("consumer", key=True),
    _bigint("producer", key=True),
    _bigint("seq", default=text("0")),
    _bigint("watermark", default=_BEGINNING),
    Index("cursors_producer", "producer"),
)

last_segments = Table(
    "last_segments",
    metadata,
    _bigint("producer", key=True),
    _bigint("subscription_id", key=True),
    _bigint("seq"),
)

segments = Table(
    "segments",
    metadata,
    _slot(),
    _bigint("subscription_id", key=True),
    _bigint("producer", key=True),
    _bigint("seq", key=True),
    _bigint("previous_seq"),
    _bigint("watermark"),
    Column("records", ARRAY(Integer), nullable=False),
    Column("ends", ARRAY(BigInteger), nullable=False),
    Column("checksums", ARRAY(BigInteger), nullable=False),
    _bigint("event_time_lo"),
    _bigint("event_time_hi"),
    Column("payload", LargeBinary, nullable=False),
    postgresql_partition_by="LIST (slot)",
)

deltas = Table(
    "deltas",
    metadata,
    _slot(),
    _bigint("interval_id", key=True),
    _bigint("bundle", key=True),
    Column("part", Integer, primary_key=True, autoincrement=False),
    Column("bytes", Integer, nullable=False),
    Column("document", JSON, nullable=False),
    postgresql_partition_by="LIST (slot)",
)

dedupe_runs = Table(
    "dedupe_runs",
    metadata,
    _slot(),
    _bigint("interval_id", key=True),
    _bigint("bundle", key=True),
    _bigint("expires_at"),
    _bigint("clock"),
    Column("ids", LargeBinary, nullable=False),
    Column("times", LargeBinary, nullable=False),
    Column("whole", Boolean, nullable=False, server_default=text("false")),
    postgresql_partition_by="LIST (slot)",
)

epochs = Table(
    "epochs",
    metadata,
    Column("ring", Text, primary_key=True),
    _slot(),
    _text("state"),
    _moment("started_at", nullable=True),
)

keyed = Table(
    "keyed",
    metadata,
    _bigint("interval_id"),
    *(Column(name, Text(collation="C"), nullable=False) for name in ("kind", "namespace", "key", "subkey")),
    _bigint("key_hash"),
    _bigint("fire_at"),
    _bigint("bundle"),
    Column("value", Text(collation="C"), nullable=False),
    Index(
        "keyed_identity",
        "interval_id",
        "kind",
        text("hashtextextended(key, 0)"),
        "namespace",
        text("hashtextextended(subkey, 0)"),
        "key_hash",
        unique=True,
    ),
    Index("keyed_others", "kind", "interval_id", postgresql_where=text("kind <> 'state'")),
)

dead_letters = Table(
    "dead_letters",
    metadata,
    _identity("dead_letter_id", BigInteger),
    _bigint("interval_id"),
    _bigint("bundle"),
    *(_text(n) for n in ("stream", "computation", "reason", "detail", "traceback", "source_position", "wire")),
    Column("input", Integer, nullable=False),
    _text("key", nullable=True),
    _bigint("event_time", nullable=True),
    Column("dedupe_id", LargeBinary),
    Column("payload", LargeBinary, nullable=False),
    Column("corrected", LargeBinary),
    *_settling(),
    _moment("dead_lettered_at", func.now()),
    Index("dead_letters_age", "dead_lettered_at"),
    Index("dead_letters_requested", "interval_id", "dead_letter_id", postgresql_where=text(REQUESTED)),
    Index("dead_letters_settled", "state_at", postgresql_where=text(SETTLED)),
)

late_records = Table(
    "late_records",
    metadata,
    _identity("late_record_id", BigInteger),
    _bigint("interval_id"),
    _bigint("bundle"),
    *(_text(n) for n in ("stream", "computation", "key")),
    Column("input", Integer, nullable=False),
    _bigint("event_time"),
    _bigint("watermark"),
    _bigint("window_start", nullable=True),
    _bigint("window_end", nullable=True),
    Column("whole", Boolean, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    *_settling(),
    _moment("recorded_at", func.now()),
    Index("late_records_requested", "interval_id", "late_record_id", postgresql_where=text(REQUESTED)),
    Index("late_records_age", "recorded_at"),
    Index("late_records_settled", "state_at", postgresql_where=text(SETTLED)),
)

pauses = Table(
    "pauses",
    metadata,
    _bigint("interval_id", key=True),
    _bigint("bundle"),
    _text("reason"),
    _moment("paused_at", func.now()),
)

outbox = Table(
    "outbox",
    metadata,
    _bigint("interval_id", key=True),
    Column("target", Text, primary_key=True),
    _bigint("sequence", key=True),
    _text("key", nullable=True),
    Column("payload", LargeBinary, nullable=False),
    _moment("written_at", func.now()),
)

source_states = Table(
    "source_states",
    metadata,
    _bigint("interval_id", key=True),
    Column("quiet", Boolean, nullable=False),
)

releases = Table(
    "releases",
    metadata,
    _identity("release_id", BigInteger),
    _bigint("interval_id"),
    _text("key"),
    _bigint("ticket"),
    Column("discards", Boolean, nullable=False),
    Column("requested_by", Text, nullable=False, server_default=text("SESSION_USER")),
    _moment("requested_at", func.clock_timestamp()),
)

events = Table(
    "events",
    metadata,
    _identity("event_id", BigInteger),
    _graph(),
    _text("kind"),
    Column("detail", JSONB, nullable=False),
    _moment("at", func.clock_timestamp()),
    Index("events_at", "graph_id", "at"),
    Index("events_age", "at"),
)

expired = Table(
    "expired",
    metadata,
    _graph(),
    *(_text(n) for n in ("pile", "stream", "computation", "reason")),
    _bigint("count"),
    PrimaryKeyConstraint("graph_id", "pile", "stream", "computation", "reason"),
)

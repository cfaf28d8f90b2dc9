"""A table as a source: what it has, and then its changes, by logical decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from millpy.errors import ConfigError, GraphError
from millpy.formats.message import check_field
from millpy.ingest.protocol import Injector, Source, SourceSetup
from millpy.limits import NAME_BYTES_MAX
from millpy.model.arguments import check_flags, check_instance, check_texts
from millpy.model.identity import Identity
from millpy.model.identity_text import GraphPart
from millpy.model.record import RecordType

OPERATIONS = ("snapshot", "insert", "update", "delete", "truncate")
DEFAULT_OPERATIONS = ("snapshot", "insert", "update", "delete")


@dataclass(frozen=True, slots=True, repr=False)
class ChangeFields(GraphPart):
    """The fields of a record that a change itself fills, beside the columns of the row; None fills none.

    Attributes:
        operation: the field (str) that gets "snapshot", "insert", "update", "delete" or "truncate".
        before: the field that gets the row before the change as an object, or null: of a struct with defaults, or a
            dict. Without `REPLICA IDENTITY FULL` on the table, it has the key of a deleted row, or of one whose key
            has changed.
        committed_at: the field that gets the time of the commit: a datetime, or an int in µs since the epoch. Of a row
            of the first copy, it is the time of that.
    """

    operation: str | None = None
    before: str | None = None
    committed_at: str | None = None

    def __post_init__(self) -> None:
        parts = {"operation": self.operation, "before": self.before, "committed_at": self.committed_at}
        check_texts('for example ChangeFields(operation="op")', **parts)

    def identity(self) -> Identity:
        """Describe which field each part fills."""
        return {
            "kind": "change_fields",
            "operation": self.operation,
            "before": self.before,
            "committed_at": self.committed_at,
        }

    def names(self) -> list[str]:
        """Return the fields that are filled."""
        return [name for name in (self.operation, self.before, self.committed_at) if name is not None]

    def validate(self, record_type: RecordType) -> None:
        """Check that the fields exist, differ, and can hold their values. Raises GraphError."""
        struct, names = record_type.struct.__name__, self.names()
        if len(set(names)) < len(names):
            raise GraphError(f"two parts of a change fill the same field of {struct}: {', '.join(names)}")
        wanted: list[tuple[str, str | None, tuple[Any, ...]]] = [
            ("operation", self.operation, (str,)),
            ("before", self.before, ()),
            ("committed_at", self.committed_at, (datetime, int)),
        ]
        for part, name, kinds in wanted:
            if name is not None and check_field(record_type, name, f"{part}=") not in kinds and kinds:
                raise GraphError(f"{part}={name!r} must be {' or '.join(kind.__name__ for kind in kinds)}")


NO_CHANGE_FIELDS = ChangeFields()


def table_name(table: str, kind: str) -> tuple[str, str]:
    """Return the schema and the name of a table, given as `orders` or `sales.orders`.

    Raises:
        ConfigError: it is no such name.
    """
    parts = table.split(".") if isinstance(table, str) else []
    if not 1 <= len(parts) <= 2 or not all(
        0 < len(part.encode()) <= NAME_BYTES_MAX and "\0" not in part for part in parts
    ):
        raise ConfigError(
            f"{kind} needs the name of a table, not {table!r}", hint="name it with its schema: sales.orders"
        )
    return ("public", parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def check_named(record_type: RecordType) -> None:
    """Refuse record classes that are written as arrays, which have no names for columns. Raises GraphError."""
    if record_type.struct.__struct_config__.array_like:
        raise GraphError(
            f"columns of a table do not fit {record_type.struct.__name__}, which is written as an array",
            hint="remove array_like=True from the class",
        )


@dataclass(frozen=True, slots=True)
class PostgresTable(Source):
    """The rows of a table, and then each change of it, in the order of commits, exactly once.

    A record has the columns of the row after the change, of a deleted row those that the log has: its key, or all
    with `REPLICA IDENTITY FULL`. The identity has the table, the fields and the operations.

    Attributes:
        table: the name, `orders` (in schema public) or `sales.orders`. It needs a primary key.
        fields: the fields that the change itself fills; by default none.
        operations: what becomes records: by default all but "truncate", which has no row.
        copy: whether to begin with the rows that the table has; otherwise with the changes after the deployment.
        database: the URL of another database than that of the workers; it overrides `MILLPY_SOURCE_DATABASE_URL`.
        publication: the publication to read; by default one of its own, which the first worker creates.
    """

    table: str
    fields: ChangeFields = NO_CHANGE_FIELDS
    operations: Sequence[str] = DEFAULT_OPERATIONS
    copy: bool = True
    database: str | None = field(default=None, repr=False)
    publication: str | None = None

    def __post_init__(self) -> None:
        table_name(self.table, "PostgresTable")
        check_instance("fields", self.fields, ChangeFields, 'for example fields=ChangeFields(operation="op")')
        check_flags(copy=self.copy)
        check_texts("give a URL, postgresql://…", database=self.database)
        check_instance("operations", self.operations, Sequence, f"choose among {', '.join(OPERATIONS)}")
        unknown = [name for name in self.operations if name not in OPERATIONS]
        if unknown or not self.operations or isinstance(self.operations, str):
            raise ConfigError(
                f"unknown value operations={self.operations!r}", hint=f"choose among {', '.join(OPERATIONS)}"
            )
        if self.publication is not None:
            check_instance("publication", self.publication, str, 'for example publication="plant"')
        if self.publication is not None and not 0 < len(self.publication.encode()) <= NAME_BYTES_MAX:
            raise ConfigError(
                f"publication={self.publication!r} has {len(self.publication.encode())} bytes, and a name in PostgreSQL"
                f" has 1 to {NAME_BYTES_MAX}",
                hint="pg_publication shows the name that PostgreSQL has made of a longer one",
            )

    @property
    def schema(self) -> str:
        """The schema of the table."""
        return table_name(self.table, "PostgresTable")[0]

    @property
    def name(self) -> str:
        """The name of the table in its schema."""
        return table_name(self.table, "PostgresTable")[1]

    def identity(self) -> Identity:
        """Describe the table and the records that it becomes."""
        return {
            "kind": "postgres_table",
            "table": f"{self.schema}.{self.name}",
            "fields": self.fields.identity(),
            "operations": [name for name in OPERATIONS if name in self.operations],
        }

    def partitions(self) -> tuple[str, ...]:
        """Return one source partition: commits of one database have one order."""
        return (f"{self.schema}.{self.name}",)

    def validate(self, record_type: RecordType) -> None:
        """Check the class, and the fields that the change fills. Raises GraphError."""
        check_named(record_type)
        self.fields.validate(record_type)

    def connect(self, setup: SourceSetup) -> Injector:
        """Return the injector, not yet connected.

        Raises:
            ConfigError: there is no database, or its URL cannot be read.
        """
        from millpy.sources.postgres.table_reader import follow_table  # psycopg takes long to import

        return follow_table(setup, self)

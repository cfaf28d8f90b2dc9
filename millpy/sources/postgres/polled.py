"""A table as a source, polled by a column that grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta

from millpy.errors import ConfigError
from millpy.ingest.protocol import Injector, Source, SourceSetup
from millpy.model.arguments import check_texts
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sources.postgres.table import check_named, table_name

DEFAULT_LAG = timedelta(seconds=10)
DEFAULT_EVERY = timedelta(seconds=1)
EVERY_MIN = timedelta(milliseconds=10)


@dataclass(frozen=True, slots=True)
class PolledTable(Source):
    """The rows of a table whose column grows, such as a serial number or a time of insertion, once each.

    A row is read when the column has had its value, or a greater one, for `lag`: transactions that take a value and
    commit it later than that are missed. So are rows that come, by their primary key, before 1,000 or more rows of the
    same value that were read. Deletes are not seen, and updates only if they raise the column. The identity has the
    table and the column.

    Attributes:
        table: the name, `events` (in schema public) or `plant.events`. It needs a primary key.
        column: the column; there should be an index on it and then the primary key. Rows with NULL are not read.
        lag: the time within which every transaction commits after it has taken a value, at least 0.
        every: how often to look, at least 10 ms.
        database: the URL of another database than that of the workers; it overrides `MILLPY_SOURCE_DATABASE_URL`.
    """

    table: str
    column: str
    lag: timedelta = DEFAULT_LAG
    every: timedelta = DEFAULT_EVERY
    database: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        table_name(self.table, "PolledTable")
        check_texts("give a URL, postgresql://…", database=self.database)
        if not isinstance(self.column, str) or not 0 < len(self.column.encode()) < 64 or "\0" in self.column:
            raise ConfigError(
                f"PolledTable needs the name of a column that grows, not {self.column!r}",
                hint='an example: PolledTable("plant.events", column="number")',
            )
        for setting, value, least in (("lag", self.lag, timedelta(0)), ("every", self.every, EVERY_MIN)):
            if not isinstance(value, timedelta) or value < least:
                hint = f"choose at least {least}, for example {setting}=seconds(30)"
                raise ConfigError(f"{setting}={value} is out of range", hint=hint)

    def identity(self) -> Identity:
        """Describe the table and the column."""
        schema, name = table_name(self.table, "PolledTable")
        return {"kind": "polled_table", "table": f"{schema}.{name}", "column": self.column}

    def partitions(self) -> tuple[str, ...]:
        """Return one source partition: the column is one order."""
        return (".".join(table_name(self.table, "PolledTable")),)

    def validate(self, record_type: RecordType) -> None:
        """Check that records are objects. Raises GraphError."""
        check_named(record_type)

    def connect(self, setup: SourceSetup) -> Injector:
        """Return the injector, not yet connected.

        Raises:
            ConfigError: there is no database, or its URL cannot be read.
        """
        from millpy.sources.postgres.polled_thread import poll_table  # psycopg takes long to import

        return poll_table(setup, self)

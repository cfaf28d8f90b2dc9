"""The audit of one deployed graph: which engine recomputes which table from what, and what is remembered of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from millpy.admin.audits import described, dropped_before, may_record, record_hours, tables_of
from millpy.admin.corrections import corrected_windows
from millpy.admin.json_output import json_text
from millpy.admin.queries import Admin, Row
from millpy.clock import SystemClock
from millpy.errors import ConfigError, StoreUnavailableError, TableSwitchedError, UsageError
from millpy.model.changed_meaning import changed_since
from millpy.model.graph_changes import Description, GraphChange, changes_between, changes_text
from millpy.model.horizons import horizon_changes
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant, instant, to_datetime

if TYPE_CHECKING:
    from millpy.model.deployment import GraphSpec, TableSpec
    from millpy.spark.archive_input import Archive
    from millpy.spark.audit import AuditScope, TableAudit
    from millpy.spark.job import HostedPlan
    from millpy.spark.native import NativePlan

T = TypeVar("T")
GONE_HINT = "it was renamed or dropped, or is new in the file: deploy that, or audit other tables with --table"
DATABASE_AWAY_S_MAX = 60.0
"""How long an audit that has compared all waits for a database that restarts."""
DATABASE_RETRY_S = 2.0
WATERMARKS = """
SELECT computation, count(*) AS intervals,
       min(CASE low_watermark WHEN 'infinity' THEN 4611686018427387904 WHEN '-infinity' THEN -4611686018427387904
           ELSE (extract(epoch FROM low_watermark) * 1000000)::bigint END) AS us
  FROM millpy.watermarks WHERE graph = :graph GROUP BY computation
"""


class GraphAudit:
    """A deployed graph and the time range that is to be audited.

    Args:
        admin: the database.
        spec: the graph.
        span: start and end, in µs.

    Raises:
        UsageError: the graph is not deployed.
    """

    def __init__(self, admin: Admin, spec: GraphSpec, span: tuple[int, int] = (INSTANT_MIN, INSTANT_MAX)) -> None:
        name = admin.name_of(spec.name, spec.generation)
        if name is None:
            raise UsageError(f"{spec.name} is not deployed", hint="`millpy graphs` lists what is")
        self.graph = name
        self.spec = spec
        self._admin = admin
        self._span = span
        self._directory: str | None = None
        rows = admin.ask(WATERMARKS, graph=name)
        self._intervals = {row["computation"]: int(row["intervals"]) for row in rows}
        self.final = {row["computation"]: int(row["us"]) for row in rows}

    @contextmanager
    def unchanged(self, tables: Sequence[TableSpec]) -> Iterator[None]:
        """Check that the tables are deployed as in the file and, at the end, that their names mean the same tables.

        Raises:
            UsageError: the file is of another graph than the deployed one, so an audit would find differences.
            ConfigError: a table or column is gone, or the role sees only some rows.
            TableSwitchedError: another generation has the name now, or a table was dropped.
        """
        if may_record(self._admin):
            deployed = described(self._admin, self.graph)
            self._check_description(deployed)
            for table in tables:
                self._check_since(deployed, table)
        before, dropped = tables_of(self._admin, self.graph), dropped_before(self._admin, self.graph)
        for table in tables:
            self._check_table(table, before.get(table.name))
        yield
        newly_dropped = _when_back(lambda: dropped_before(self._admin, self.graph))
        after = _when_back(lambda: tables_of(self._admin, self.graph))
        for table in tables:
            lost = newly_dropped.get(table.name, INSTANT_MIN)
            if lost > max(self._span[0], dropped.get(table.name, INSTANT_MIN)):
                raise TableSwitchedError(
                    f"old rows of {self.graph}.{table.name} were dropped while it was audited",
                    hint="audit it again, or only newer times with --from",
                )
            if after.get(table.name, {}).get("oid") != before[table.name]["oid"]:
                raise TableSwitchedError(
                    f"{self.graph}.{table.name} was switched to another table, or dropped, while it was audited",
                    hint="audit it again",
                )

    def _check_table(self, table: TableSpec, stored: Row | None) -> None:
        """Check that a stored table can be compared."""
        name = f"{self.graph}.{table.name}"
        if stored is None:
            raise ConfigError(f"there is no table {name}", hint=GONE_HINT)
        lacking = [column.name for column in table.columns() if column.name not in stored["columns"]]
        if lacking:
            raise ConfigError(f"{name} has no column {lacking[0]}", hint=GONE_HINT)
        if stored["is_partial"]:
            raise ConfigError(
                f"row-level security hides rows of {name} from this role",
                hint="audit as the owner of the tables, or as a role with BYPASSRLS",
            )

    def _check_description(self, deployed: Description) -> None:
        """Check that the deployed graph and the file's are equal, or one has what the other has and more."""
        ours, theirs = _without_sources(self.spec.description()), _without_sources(deployed)
        changes = changes_between(theirs, ours)
        # Seen from the other side, what the file lacks is an addition.
        if horizon_changes(theirs, ours) or all(
            not _grows(found) for found in (changes, changes_between(ours, theirs))
        ):
            raise UsageError(
                f"{self.graph} is not deployed as in the file: {changes_text(changes)}",
                hint="give the file with which the workers run",
            )

    def _check_since(self, deployed: Description, table: TableSpec) -> None:
        """Check that all windows are of the present description."""
        since = changed_since(deployed, table.computation)
        if self._span[0] < since:
            at = to_datetime(Instant(since)).isoformat()
            raise UsageError(
                f"{self.graph}.{table.name} has windows from before {at}, when the deployed graph was changed in place",
                hint=f"compare those that begin later: --from {at}, or a window's length after it",
            )

    def hosted(self, session: Any, hosted: HostedPlan, tables: Sequence[TableSpec]) -> list[TableAudit]:
        """Audit tables by a batch of the graph; differences have their records if its input is `archive`."""
        from millpy.spark.audit import audit
        from millpy.spark.batch import run_hosted

        with run_hosted(session, hosted) as result:
            found = audit(session, result.tables, tables, self._scope())
        if self._directory is not None:
            found = [self._with_records(session, table, self._directory) for table in found]
        return found

    def differing(
        self, session: Any, hosted: HostedPlan, table: TableSpec
    ) -> tuple[TableAudit, list[tuple[str, Sequence[Any]]]]:
        """Audit one table of windows; return all rows that differ, too."""
        from millpy.spark.audit import audit
        from millpy.spark.batch import run_hosted
        from millpy.spark.differing_rows import differing_rows

        with run_hosted(session, hosted) as result:
            rows = differing_rows(session, result.tables[table.name], table, self._scope())
            return audit(session, result.tables, [table], self._scope())[0], rows

    def archive(self, directory: str) -> Archive:
        """Return the graph's archives as the input of a batch. Only what they hold already is final."""
        from millpy.spark.archive_input import Archive

        self._directory = directory
        names = [computation.name for computation in self.spec.computations if computation.kind == "archive"]
        held = min((self.final[name] for name in names if name in self.final), default=INSTANT_MAX)
        self.final = {name: min(final, held) for name, final in self.final.items()}
        return Archive(directory, listed={name: self._admin.archive_files(self.graph, name) for name in names})

    def native(self, session: Any, plans: Sequence[NativePlan], directory: str) -> list[TableAudit]:
        """Audit tables by Spark's own windows.

        Raises:
            UsageError: an archive is empty.
        """
        from millpy.spark.audit import audit_natively
        from millpy.spark.native import native_table

        found = []
        start, end = self._span
        for plan in plans:
            for name in (plan.table.computation, plan.input.archive, plan.input.source):
                if name not in self.final:
                    raise UsageError(f"{name} is not deployed", hint="deploy the graph with which the workers run")
            files = self._files(plan.input.archive, directory, start - plan.window["size_us"], end)
            table = native_table(session, plan, files, partitions=self._intervals[plan.input.source])
            final = min(self.final[plan.table.computation], self.final[plan.input.archive])
            found.append(audit_natively(session, table, plan, self._scope({plan.table.computation: final})))
        return found

    def record(self, found: Sequence[TableAudit], engine: str, *, by_service: bool = False) -> int | None:
        """Record the hours that were compared whole; return their number, or None if this role may not."""
        if not _when_back(lambda: may_record(self._admin)):
            return None
        specs = {spec.name: spec for spec in self.spec.tables}
        recorded = 0
        for table in found:
            hours = _hours(table, specs[table.table])
            record = partial(
                record_hours, self._admin, self.graph, table.table, hours, engine=engine, by_service=by_service
            )
            recorded += _when_back(record)
        return recorded

    def _with_records(self, session: Any, found: TableAudit, directory: str) -> TableAudit:
        """Add the archived records of the windows that differ, where an archive has just these."""
        from millpy.spark.contributing import archived_records, with_records
        from millpy.store.archive.input import archived_input

        (table,) = (table for table in self.spec.tables if table.name == found.table)
        of = archived_input(self.spec, table)
        if isinstance(of, str) or not found.examples:
            return found
        start = min(instant(one.row["window_start"]) for one in found.examples)
        end = max(instant(one.row["window_end"]) for one in found.examples)
        records = archived_records(session, of, self._files(of.archive, directory, start, end))
        return dataclasses.replace(found, examples=with_records(found.examples, records, of, table))

    def _files(self, archive: str, directory: str, start: int, end: int) -> list[str]:
        """Return the archived files that may have records of a time range."""
        from millpy.store.archive.reader import ArchiveReader, TimeRange

        listed = self._admin.archive_files(self.graph, archive)
        span = TimeRange(Instant(max(INSTANT_MIN, start)), Instant(end))
        if listed and not any(file.event_time_hi >= span.first and file.event_time_lo < span.end for file in listed):
            return []  # a quiet time, in which the table must not have rows either
        reader = ArchiveReader(directory, archive, listed)
        return reader.find_all(reader.holding(span))

    def _scope(self, final: dict[str, int] | None = None) -> AuditScope:
        from millpy.spark.audit import AuditScope

        corrected = {
            table.name: corrected_windows(self._admin, self.graph, table.name)
            for table in self.spec.tables
            if table.kind == "windowed"
        }
        dropped = dropped_before(self._admin, self.graph)
        return AuditScope(self.graph, final or self.final, *self._span, self._admin.url, dropped, corrected)


def _when_back(ask: Callable[[], T]) -> T:
    """Ask the database, again after a while if it is away."""
    clock = SystemClock()
    end = clock.monotonic() + DATABASE_AWAY_S_MAX
    while True:
        try:
            return ask()
        except StoreUnavailableError:
            if clock.monotonic() >= end:
                raise
        asyncio.run(clock.sleep(DATABASE_RETRY_S))


def _without_sources(description: Description) -> Description:
    """Return a graph without the sources of its streams, which an audit need not read."""
    plain_data: dict[str, Any] = json.loads(json.dumps(description))
    for computation in plain_data["computations"].values():
        computation["identity"].pop("source", None)
        computation["partitions"] = []
    return plain_data


def _grows(changes: Sequence[GraphChange]) -> bool:
    return all(change.kind in ("addition", "setting") for change in changes)


def _hours(table: TableAudit, spec: TableSpec) -> list[dict[str, Any]]:
    from millpy.spark.audit import hour_of

    examples: dict[int, list[Any]] = {}
    for one in table.examples:
        document = json.loads(json_text(dataclasses.asdict(one), indent=0))
        examples.setdefault(hour_of(spec, one.row), []).append(document)
    return [
        {
            "hour": hour.start_us,
            "rows": hour.rows,
            "differences": hour.differences,
            "uncertain": hour.uncertain,
            "corrected": hour.corrected,
            "examples": examples.get(hour.start_us, []),
        }
        for hour in table.hours
    ]

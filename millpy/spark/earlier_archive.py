"""The archives that an earlier generation of a graph has written, as the history of a backfill."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from millpy.admin.queries import Admin, Row
from millpy.clock import Clock
from millpy.errors import UsageError
from millpy.model.deployment import GraphSpec
from millpy.spark.archive_input import Archive

CAUGHT_UP_S_MAX = 60.0
"""How long an archiver may make no progress until it counts as absent."""
CAUGHT_UP_EVERY_S = 0.5
ARCHIVED_BEFORE = """
SELECT graph FROM millpy.archive JOIN millpy.graphs USING (graph)
 WHERE family = :family AND generation < :generation AND files > 0 ORDER BY generation DESC LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class EarlierArchive:
    """The archives of the newest earlier generation that has any.

    Attributes:
        database: the database of both generations, as URL.
        directory: the directory of all archives, or the URL of an object store.
        start: read records whose event time is this or later; None for all.
    """

    database: str
    directory: str | Path
    start: datetime | None = None

    def listed(self, spec: GraphSpec, sources: Collection[str]) -> Archive:
        """Return what the manifest lists now, in place of some sources.

        Raises:
            UsageError: no earlier generation has archived anything.
        """
        admin = Admin(self.database)
        earlier = self._earlier(admin, spec)
        archives = [computation.name for computation in spec.computations if computation.kind == "archive"]
        found = {name: admin.archive_files(earlier, name) for name in archives}
        return Archive(self.directory, self.start, None, found, frozenset(sources))

    def wait(self, spec: GraphSpec, clock: Clock) -> None:
        """Wait until everything is archived that the earlier generation has taken up to now.

        Raises:
            UsageError: its archiver makes no progress.
        """
        admin = Admin(self.database)
        earlier = self._earlier(admin, spec)
        wanted = {row["consumer"]: int(row["produced"]) for row in _accounts(admin, earlier)}
        left, progress_at = -1, clock.monotonic()
        while behind := sum(
            max(0, wanted.get(row["consumer"], 0) - int(row["produced"]) + int(row["pending"]))
            for row in _accounts(admin, earlier)
        ):
            if behind != left:
                left, progress_at = behind, clock.monotonic()
            if clock.monotonic() - progress_at > CAUGHT_UP_S_MAX:
                raise UsageError(
                    f"{behind:,} records of {earlier} are not archived, and no archiver makes progress",
                    hint="run `millpy archive` with the graph's earlier file, then start the backfill again",
                )
            threading.Event().wait(CAUGHT_UP_EVERY_S)

    def _earlier(self, admin: Admin, spec: GraphSpec) -> str:
        found = admin.ask(ARCHIVED_BEFORE, family=spec.name, generation=spec.generation)
        if not found:
            raise UsageError(
                f"no generation of {spec.name} before {spec.generation} has archived anything",
                hint="archive the running generation with .archive() and `millpy archive`; or name files: --input",
            )
        return str(found[0]["graph"])


def _accounts(admin: Admin, graph: str) -> list[Row]:
    archives = {row["archive"] for row in admin.archives(graph)}
    return [row for row in admin.accounting(graph) if row["consumer"] in archives and row["produced"] is not None]

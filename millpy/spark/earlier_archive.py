"""The archives that an earlier generation of a graph has written, as the history of a backfill."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from millpy.clock import Clock
from millpy.errors import UsageError
from millpy.model.deployment import GraphSpec
from millpy.model.time import Instant
from millpy.spark.archive_input import Archive
from millpy.spark.connection import connected, literal
from millpy.store.archive.reader import ListedFile, archive_of

CAUGHT_UP_S_MAX = 60.0
"""How long an archiver may make no progress until it counts as absent."""
CAUGHT_UP_EVERY_S = 0.5
ARCHIVED_BEFORE = """
SELECT graph FROM millpy.archive JOIN millpy.graphs USING (graph)
 WHERE family = {family} AND generation < {generation} AND files > 0 ORDER BY generation DESC LIMIT 1
"""
FILES = """
SELECT archive, path, partitions::text, (extract(epoch FROM first_event_time) * 1000000)::bigint,
       (extract(epoch FROM last_event_time) * 1000000)::bigint
  FROM millpy.archive_files WHERE graph = {graph} ORDER BY archive, path
"""
DECLARED = "SELECT archive FROM millpy.archive WHERE graph = {graph}"
ACCOUNTS = """
SELECT consumer, stream, sum(produced)::bigint, sum(pending)::bigint FROM millpy.accounting
 WHERE graph = {graph} AND produced IS NOT NULL
   AND consumer IN (SELECT archive FROM millpy.archive WHERE graph = {graph})
 GROUP BY consumer, stream
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
            UsageError: no earlier generation has archived anything, or it has not all archives of these sources.
        """
        earlier = self._earlier(spec)
        archives = [computation.name for computation in spec.computations if computation.kind == "archive"]
        declared = {name for (name,) in self._ask(DECLARED, graph=literal(earlier, "text"))}
        needed = {archive.name for source in sources if (archive := archive_of(spec, source)) is not None}
        if unknown := sorted(needed - declared):
            raise UsageError(
                f"{earlier} has no archive {unknown[0]!r}",
                hint=f"archive under the same name, of {', '.join(sorted(declared))}; or name files: --input",
            )
        found: dict[str, list[ListedFile]] = {name: [] for name in archives}
        for name, path, partitions, lo, hi in self._ask(FILES, graph=literal(earlier, "text")):
            if name in found:
                found[name].append(ListedFile(path, Instant(lo), Instant(hi), json.loads(partitions)))
        return Archive(self.directory, self.start, None, found, frozenset(sources))

    def wait(self, spec: GraphSpec, clock: Clock) -> None:
        """Wait until everything is archived that the earlier generation has taken up to now.

        Raises:
            UsageError: its archiver makes no progress.
        """
        earlier = self._earlier(spec)
        graph = literal(earlier, "text")
        wanted = {(archive, stream): produced for archive, stream, produced, _ in self._ask(ACCOUNTS, graph=graph)}
        left, progress_at = -1, clock.monotonic()
        while behind := sum(
            max(0, wanted.get((archive, stream), 0) - produced + pending)
            for archive, stream, produced, pending in self._ask(ACCOUNTS, graph=graph)
        ):
            if behind != left:
                left, progress_at = behind, clock.monotonic()
            if clock.monotonic() - progress_at > CAUGHT_UP_S_MAX:
                raise UsageError(
                    f"{behind:,} records of {earlier} are not archived, and no archiver makes progress",
                    hint="run `millpy archive` with the graph's earlier file, then start the backfill again",
                )
            threading.Event().wait(CAUGHT_UP_EVERY_S)

    def _earlier(self, spec: GraphSpec) -> str:
        found = self._ask(ARCHIVED_BEFORE, family=literal(spec.name, "text"), generation=str(spec.generation))
        if not found:
            raise UsageError(
                f"no generation of {spec.name} before {spec.generation} has archived anything",
                hint="archive the running generation with .archive() and `millpy archive`; or name files: --input",
            )
        return str(found[0][0])

    def _ask(self, query: str, **given: str) -> list[tuple[Any, ...]]:
        with connected(self.database) as connection:
            return connection.rows(query.format(**given))

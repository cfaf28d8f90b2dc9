"""Checks histories: that of a table is the sequence of the states of its rows, each committed change once.

A history is judged by the rows of the bundles alone. After each bundle the newest entry of a window is the row that the
table has, or a retraction if the table has none, so "what did we believe then" has the right answer at every moment.
The times in a history are the database's, whose clock steps back here: entries are in the order of their commits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from millpy.store.memory.tables import Row, StoredTable
from millpy.testing.simulation.history import CommittedBundle, RunHistory

OF_ENTRY = ("emitted_at", "is_retraction")
OF_COMMIT = ("emitted_at", "is_retraction", "interval_id", "bundle")
DELETED_BY_USERS = "per_window"
"""A fault deletes rows of this table; its history keeps them."""


@dataclass(slots=True)
class HistoryJudge:
    """Judges the histories of a graph.

    Attributes:
        seen: (table, window) -> the number of entries that were judged.
    """

    history: RunHistory
    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def skip(self, table: str, window: tuple[Any, ...]) -> None:
        """Take the entries of a window as they are: an operator has added some."""
        for stored in self.history.tables():
            if stored.spec.name == table:
                self.seen[table, window] = len(stored.history.get(window, ()))

    def forget(self, tables: Collection[str]) -> None:
        """Forget what was judged of tables that begin anew."""
        self.seen = {name: number for name, number in self.seen.items() if name[0] not in tables}

    def follow(self, commit: CommittedBundle) -> Iterator[str]:
        """Judge the entries that a bundle has added."""
        for table in self.history.tables():
            if table.spec.history and table.spec.computation == commit.observed.computation:
                yield from self._follow(table, commit)

    def _follow(self, table: StoredTable, commit: CommittedBundle) -> Iterator[str]:
        added: list[Row] = []
        for window, entries in table.history.items():
            name = (table.spec.name, window)
            known = self.seen.get(name, 0)
            if entries[-1]["interval_id"] != commit.observed.interval_id:
                continue
            if len(entries) == known:
                if window not in table.rows:
                    yield from _newest(table, window)
                continue
            self.seen[name] = len(entries)
            added += [entry for entry in entries[known:] if not entry["is_retraction"]]
            yield from self._judge(name, entries, known)
            yield from _newest(table, window)
        rows = commit.rows.get(table.spec.name, [])
        if sorted(map(str, rows)) != sorted(str(_omit(entry, OF_ENTRY)) for entry in added):
            yield f"the history of {table.spec.name} has {len(added)} new panes, the bundle has {len(rows)} others"

    def _judge(self, name: tuple[Any, ...], entries: list[Row], known: int) -> Iterator[str]:
        """Judge the new entries of a window: in order, each retraction equal to the pane before it."""
        for place in range(known, len(entries)):
            entry, before = entries[place], entries[place - 1] if place else None
            if entry["is_retraction"] and (
                before is None or before["is_retraction"] or _omit(entry, OF_COMMIT) != _omit(before, OF_COMMIT)
            ):
                yield f"{name} takes back {entry}, which is not the pane before it: {before}"
            if before is not None and entry["bundle"] < before["bundle"]:
                yield f"{name} has an entry from before the one before it: {entry}"

    def finished(self) -> Iterator[str]:
        """Judge all windows at the end: the rows as of now are those of the table."""
        for table in self.history.tables():
            for window in {**table.history, **table.rows} if table.spec.history else ():
                yield from _newest(table, window)


def _newest(table: StoredTable, window: tuple[Any, ...]) -> Iterator[str]:
    """Yield a difference between the row of a window and its newest entry."""
    row, entry = table.rows.get(window), table.history.get(window, [{"is_retraction": True}])[-1]
    if row is None and table.spec.name == DELETED_BY_USERS:
        return
    believed = None if entry["is_retraction"] else _omit(entry, OF_ENTRY)
    if believed != row:
        yield f"the history of {table.spec.name} has {believed} for {window}, the table {row}"


def _omit(row: Row, names: tuple[str, ...]) -> Row:
    return {name: value for name, value in row.items() if name not in names}

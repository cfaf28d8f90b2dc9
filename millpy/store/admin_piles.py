"""What was set aside, for people: dead letters and late records, through their views and functions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millpy.store.admin import Admin, Row

progress = logging.getLogger("millpy.progress")
TEXT_CHARACTERS = 60
AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which records: those with these ids, or all that have these words; empty words do not count.

    `state` is "any" for all of them.
    """

    graph: str = ""
    computation: str = ""
    stream: str = ""
    reason: str = ""
    state: str = "set_aside"
    ids: tuple[int, ...] = ()

    def of_graph(self, graph: str | None) -> Wanted:
        """The same of one graph."""
        return replace(self, graph=graph or "")

    def parameters(self) -> dict[str, Any]:
        """What the statements of a pile take."""
        named = {"ids": list(self.ids), "every": not self.ids}
        words = {"graph": self.graph, "computation": self.computation, "stream": self.stream, "reason": self.reason}
        return {**words, **named, "state": "any" if self.ids else self.state}


@dataclass(frozen=True, slots=True)
class Statements:
    """What is asked about a pile; the first two take the parameters of `Wanted`."""

    rows: str
    ids: str
    states: str
    replay: str
    discard: str


@dataclass(frozen=True, slots=True)
class Pile:
    """Where records lie, and how it is spoken of."""

    word: str
    command: str
    columns: tuple[str, ...]
    statements: Statements

    def rows(self, admin: Admin, wanted: Wanted, limit: int) -> list[Row]:
        """Records, the newest `limit` of them, oldest first."""
        return admin.ask(self.statements.rows, **wanted.parameters(), rows=limit)[::-1]

    def ids(self, admin: Admin, wanted: Wanted) -> list[int]:
        """The ids of the records."""
        return [row["id"] for row in admin.ask(self.statements.ids, **wanted.parameters())]

    def states(self, admin: Admin, ids: Sequence[int]) -> dict[str, int]:
        """How many of them are in which state."""
        return {row["state"]: row["n"] for row in admin.ask(self.statements.states, ids=list(ids))}

    def replay(self, admin: Admin, ids: Sequence[int]) -> int:
        """Ask for records to be taken again; how many were waiting for it."""
        return _in_pieces(admin, self.statements.replay, ids)

    def discard(self, admin: Admin, ids: Sequence[int]) -> int:
        """Give records up; how many were not settled."""
        return _in_pieces(admin, self.statements.discard, ids)

    def replay_corrected(self, admin: Admin, number: int, payload: bytes) -> int:
        """Ask for a dead letter to be taken again, read from another payload."""
        found = admin.change("SELECT millpy.replay_dead_letter(:id, :payload) AS n", id=number, payload=payload)
        return int(found[0]["n"])

    def short(self, row: Row) -> Mapping[str, Any]:
        """A row as one line."""
        return {name: _short(row[name]) for name in self.columns}


def _in_pieces(admin: Admin, statement: str, ids: Sequence[int]) -> int:
    # A statement holds its rows until it ends, and workers settle them meanwhile.
    pieces = [list(ids[start : start + AT_ONCE]) for start in range(0, len(ids), AT_ONCE)]
    done = 0
    for number, piece in enumerate(pieces):
        progress.debug("%s of %s records", f"{number * AT_ONCE:,}", f"{len(ids):,}")
        done += int(admin.change(statement, ids=piece)[0]["n"])
    return done


DEAD_LETTERS = Pile(
    "dead letter",
    "dead-letters",
    (
        "dead_letter_id",
        "graph",
        "computation",
        "reason",
        "state",
        "attempts",
        "source_position",
        "detail",
        "payload_text",
    ),
    Statements(
        rows="""
            SELECT * FROM millpy.dead_letters
             WHERE (:graph = '' OR graph = :graph) AND (:computation = '' OR computation = :computation)
               AND (:stream = '' OR stream = :stream) AND (:reason = '' OR reason = :reason)
               AND (:state = 'any' OR state = :state) AND (:every OR dead_letter_id = ANY (CAST(:ids AS bigint[])))
             ORDER BY dead_letter_id DESC LIMIT :rows""",
        ids="""
            SELECT dead_letter_id AS id FROM millpy.dead_letters
             WHERE (:graph = '' OR graph = :graph) AND (:computation = '' OR computation = :computation)
               AND (:stream = '' OR stream = :stream) AND (:reason = '' OR reason = :reason)
               AND (:state = 'any' OR state = :state) AND (:every OR dead_letter_id = ANY (CAST(:ids AS bigint[])))
             ORDER BY 1""",
        states="""
            SELECT state, count(*) AS n FROM millpy.dead_letters
             WHERE dead_letter_id = ANY (CAST(:ids AS bigint[])) GROUP BY state""",
        replay="SELECT millpy.replay_dead_letters(CAST(:ids AS bigint[])) AS n",
        discard="SELECT millpy.discard_dead_letters(CAST(:ids AS bigint[])) AS n",
    ),
)
LATE_RECORDS = Pile(
    "late record",
    "late",
    ("late_record_id", "graph", "computation", "key", "event_time", "watermark", "window_end", "state", "attempts"),
    Statements(
        rows="""
            SELECT * FROM millpy.late_records
             WHERE (:graph = '' OR graph = :graph) AND (:computation = '' OR computation = :computation)
               AND (:stream = '' OR stream = :stream) AND (:reason = '' OR :reason = 'late')
               AND (:state = 'any' OR state = :state) AND (:every OR late_record_id = ANY (CAST(:ids AS bigint[])))
             ORDER BY late_record_id DESC LIMIT :rows""",
        ids="""
            SELECT late_record_id AS id FROM millpy.late_records
             WHERE (:graph = '' OR graph = :graph) AND (:computation = '' OR computation = :computation)
               AND (:stream = '' OR stream = :stream) AND (:reason = '' OR :reason = 'late')
               AND (:state = 'any' OR state = :state) AND (:every OR late_record_id = ANY (CAST(:ids AS bigint[])))
             ORDER BY 1""",
        states="""
            SELECT state, count(*) AS n FROM millpy.late_records
             WHERE late_record_id = ANY (CAST(:ids AS bigint[])) GROUP BY state""",
        replay="SELECT millpy.replay_late_records(CAST(:ids AS bigint[])) AS n",
        discard="SELECT millpy.discard_late_records(CAST(:ids AS bigint[])) AS n",
    ),
)


def _short(value: object) -> object:
    text = str(value)
    return text[: TEXT_CHARACTERS - 1] + "…" if isinstance(value, str) and len(text) > TEXT_CHARACTERS else value

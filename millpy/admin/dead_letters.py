"""List, replay and discard dead letters and late records, through their views and functions."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from millpy.admin.queries import Admin, Row

progress = logging.getLogger("millpy.observability.status_line")
TEXT_CHARACTERS = 60
AT_ONCE = 10_000
RECOMPUTED_AT_ONCE = 50
_INTO_RECOMPUTED = """
    SELECT millpy.replay_into_window(CAST(:ids AS bigint[]), :why, CAST(:recomputed AS jsonb[])) AS n"""
_REPLAY_LETTERS = "SELECT millpy.replay_dead_letters(CAST(:ids AS bigint[]), :into_window, :why) AS n"
_REPLAY_LETTER = "SELECT millpy.replay_dead_letter(:id, :payload, :into_window, :why) AS n"
_LATE_OF = """
    SELECT state, count(*) AS n FROM millpy.late_records
     WHERE dead_letter_id = ANY (CAST(:ids AS bigint[])) GROUP BY state"""
_CAUSE = ("graph", "computation", "stream", "reason")
_ONLY_COUNTED = """
    SELECT graph, stream, computation, reason, not_kept FROM millpy.retention
     WHERE table_name = :table AND not_kept > 0
       AND (:graph = '' OR graph = :graph) AND (:computation = '' OR computation = :computation)
       AND (:stream = '' OR stream = :stream) AND (:reason = '' OR reason = :reason)
     ORDER BY 1, 2, 3, 4"""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Selects records: those with these ids, or without ids those that match every word.

    An empty word matches every value, and so does the state "any".
    """

    graph: str = ""
    computation: str = ""
    stream: str = ""
    reason: str = ""
    state: str = "open"
    ids: tuple[int, ...] = ()

    def of_graph(self, graph: str | None) -> RecordFilter:
        """Return the same filter for one graph."""
        return replace(self, graph=graph or "")

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of `Statements.rows` and `Statements.ids`."""
        named = {"ids": list(self.ids), "every": not self.ids}
        words = {"graph": self.graph, "computation": self.computation, "stream": self.stream, "reason": self.reason}
        return {**words, **named, "state": "any" if self.ids else self.state}


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements of a record table; `rows` and `ids` take the parameters of `RecordFilter`."""

    table: str
    rows: str
    ids: str
    states: str
    discard: str


@dataclass(frozen=True, slots=True)
class RecordTable:
    """The view of dead letters or of late records.

    Attributes:
        word: what one of its records is called.
        command: the command that lists them.
        columns: the columns to show in a list.
        statements: the SQL that reads and changes them.
    """

    word: str
    command: str
    columns: tuple[str, ...]
    statements: Statements

    def rows(self, admin: Admin, wanted: RecordFilter, limit: int) -> list[Row]:
        """Return the newest `limit` records, oldest first."""
        return admin.ask(self.statements.rows, **wanted.parameters(), rows=limit)[::-1]

    def only_counted(self, admin: Admin, wanted: RecordFilter) -> list[Row]:
        """Return for each cause how many records were counted but not stored, because it had no more room."""
        view = self.statements.table
        return admin.ask(_ONLY_COUNTED, **{name: wanted.parameters()[name] for name in _CAUSE}, table=view)

    def ids(self, admin: Admin, wanted: RecordFilter) -> list[int]:
        """Return the ids of the records that `wanted` selects."""
        return [row["id"] for row in admin.ask(self.statements.ids, **wanted.parameters())]

    def states(self, admin: Admin, ids: Sequence[int]) -> dict[str, int]:
        """Return how many of these records are in each state."""
        return {row["state"]: row["n"] for row in admin.ask(self.statements.states, ids=list(ids))}

    def discard(self, admin: Admin, ids: Sequence[int]) -> int:
        """Discard records; return the number of records discarded."""
        return _in_pieces(admin, self.statements.discard, ids)

    def short(self, row: Row) -> Mapping[str, Any]:
        """Return the columns of a row that fit one line, long texts cut."""
        return {name: _short(row[name]) for name in self.columns}


def request_letters(
    admin: Admin, ids: Sequence[int], payload: bytes | None, *, into_window: bool = False, why: str = ""
) -> int:
    """Request the replay of dead letters; return the number of requests made.

    Args:
        admin: the database.
        ids: the dead letters; one, if `payload` is given.
        payload: another payload for it.
        into_window: whether they are to be added to windows that they are too late for.
        why: the reason.
    """
    wanted = {"into_window": into_window, "why": why}
    if payload is None:
        return _in_pieces(admin, _REPLAY_LETTERS, ids, **wanted)
    (number,) = ids
    return int(admin.change(_REPLAY_LETTER, id=number, payload=payload, **wanted)[0]["n"])


def late_of(admin: Admin, letters: Sequence[int]) -> dict[str, int]:
    """Return how many late records of these dead letters are in each state."""
    return {row["state"]: row["n"] for row in admin.ask(_LATE_OF, ids=list(letters))}


def request_late(admin: Admin, ids: Sequence[int]) -> int:
    """Request the replay of late records; return the number of requests made."""
    return _in_pieces(admin, "SELECT millpy.replay_late_records(CAST(:ids AS bigint[])) AS n", ids)


def request_into_window(admin: Admin, ids: Sequence[int], why: str, recomputed: Mapping[int, str]) -> int:
    """Request that late records are added to their finished windows; return the number of requests made.

    Args:
        admin: the database.
        ids: the late records.
        why: the reason.
        recomputed: what an archive says of the windows of some of them, as JSON.
    """
    plain = [one for one in ids if one not in recomputed]
    done = _in_pieces(admin, "SELECT millpy.replay_into_window(CAST(:ids AS bigint[]), :why) AS n", plain, why=why)
    for start in range(0, len(recomputed), RECOMPUTED_AT_ONCE):
        given = dict(list(recomputed.items())[start : start + RECOMPUTED_AT_ONCE])
        parameters = {"ids": list(given), "why": why, "recomputed": list(given.values())}
        done += int(admin.change(_INTO_RECOMPUTED, **parameters)[0]["n"])
    return done


def _in_pieces(admin: Admin, statement: str, ids: Sequence[int], **more: Any) -> int:
    # A statement locks its rows until it ends, and workers settle them meanwhile: pieces keep the locks short.
    pieces = [list(ids[start : start + AT_ONCE]) for start in range(0, len(ids), AT_ONCE)]
    done = 0
    for number, piece in enumerate(pieces):
        progress.debug("%s of %s records", f"{number * AT_ONCE:,}", f"{len(ids):,}")
        done += int(admin.change(statement, ids=piece, **more)[0]["n"])
    return done


DEAD_LETTERS = RecordTable(
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
        table="dead_letters",
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
        discard="SELECT millpy.discard_dead_letters(CAST(:ids AS bigint[])) AS n",
    ),
)
LATE_RECORDS = RecordTable(
    "late record",
    "late",
    ("late_record_id", "graph", "computation", "key", "event_time", "watermark", "window_end", "state", "attempts"),
    Statements(
        table="late_records",
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
        discard="SELECT millpy.discard_late_records(CAST(:ids AS bigint[])) AS n",
    ),
)


def _short(value: object) -> object:
    text = str(value)
    return text[: TEXT_CHARACTERS - 1] + "…" if isinstance(value, str) and len(text) > TEXT_CHARACTERS else value

"""Operators' requests in a `MemoryDatabase`, and their outcomes.

A dead letter's id is its position in the list, from 1; a late record's id is its position among all rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

from millpy.errors import RequestWithdrawnError
from millpy.model.checkpoint import (
    Checkpoint,
    DeadLetter,
    ExpectedRecord,
    LateRows,
    PastWindow,
    Pause,
    RecordTableName,
    Request,
)
from millpy.model.horizons import LATENESS
from millpy.model.stage import Release
from millpy.store.protocol import PendingRequests

if TYPE_CHECKING:
    from millpy.store.memory.database import MemoryDatabase
    from millpy.store.memory.tables import StoredTable

State = Literal["open", "requested", "replayed", "discarded"]


@dataclass(slots=True)
class RequestState:
    """The state of one dead letter or late record.

    Attributes:
        attempts: the number of failed replays.
        corrected: the payload with which an operator replaces the original one.
        letter: the dead letter that the last failed replay produced.
        into_window: whether the request is to add a late record to its finished window.
        detail: why that failed.
        expected_id: the place, from 1, of the expected record that a late record is; 0 for another record.
        recomputed: what an archive says of the window: its accumulators as JSON, and the row that they give.
    """

    state: State = "open"
    attempts: int = 0
    corrected: bytes | None = None
    letter: DeadLetter | None = None
    into_window: bool = False
    detail: str = ""
    expected_id: int = 0
    recomputed: tuple[bytes, bytes] | None = None


class Requests:
    """The states of all dead letters and late records of one database, its paused sources, and the keys to release.

    Attributes:
        corrections: late records that were added to finished windows, each with the row before and after.
        expected: records of dead letters that are to be added to windows that they are too late for, with the graph,
            interval and bundle that made them.
    """

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._states: dict[tuple[RecordTableName, int], RequestState] = {}
        self.corrections: list[tuple[int, bytes | None, bytes | None]] = []
        self.expected: list[tuple[int, int, int, ExpectedRecord]] = []
        self.pauses: dict[int, Pause] = {}
        self.releases: list[Release] = []
        self._release_id = 0
        self._met: set[tuple[int, object]] = set()

    # Operators' actions.

    def state_of(self, table: RecordTableName, number: int) -> RequestState:
        """Return the state of a record, which the caller may change."""
        return self._states.setdefault((table, number), RequestState())

    def replay(
        self, table: RecordTableName, number: int, payload: bytes | None = None, *, into_window: bool = False
    ) -> bool:
        """Request a replay of a record. Return False when the record cannot be replayed."""
        record = self.state_of(table, number)
        if record.state != "open" or (table == "late_records" and not self._whole()[number - 1]):
            return False
        record.state, record.corrected = "requested", payload or record.corrected
        record.into_window = into_window
        return True

    def replay_into_window(self, number: int, recomputed: tuple[bytes, bytes] | None = None) -> bool:
        """Request that a late record is added to its finished window. Return False when it cannot be."""
        record = self.state_of("late_records", number)
        starts = [start for _, _, late in self._database.late_records for start in late.window_starts]
        if record.state != "open" or starts[number - 1] is None:
            return False
        record.state, record.into_window, record.recomputed = "requested", True, recomputed
        return True

    def discard(self, table: RecordTableName, number: int) -> bool:
        """Discard a record. Return False when it is settled already."""
        record = self.state_of(table, number)
        if record.state not in ("open", "requested"):
            return False
        record.state = "discarded"
        return True

    def resume(self, interval_id: int) -> None:
        """Resume a paused source partition."""
        self.pauses.pop(interval_id, None)

    def drain(self, worker_id: UUID) -> bool:
        """Request that a live worker drains. Return False when it is requested already, or no such worker lives."""
        worker = self._database.workers.get(worker_id)
        if worker is None or worker.drain_requested or not self._database.is_live(worker_id):
            return False
        worker.drain_requested = True
        return True

    def release(self, interval_id: int, key: bytes, ticket: int, *, discard: bool = False) -> None:
        """Request the release of a parked key."""
        self._release_id += 1
        self.releases.append(Release(self._release_id, interval_id, key, ticket, discard))

    def forget(self, interval_ids: Collection[int]) -> None:
        """Let nobody replay the dead letters and late records of intervals that are gone."""
        database = self._database
        owners: dict[RecordTableName, list[int]] = {
            "dead_letters": [where for where, _, _ in database.dead_letters],
            "late_records": [where for where, _, late in database.late_records for _ in range(len(late))],
        }
        for table, found in owners.items():
            for number, where in enumerate(found, start=1):
                if where in interval_ids:
                    self.state_of(table, number).state = "discarded"
        self.releases = [release for release in self.releases if release.interval_id not in interval_ids]

    # The store's operations.

    def read_requests(self, interval_ids: Sequence[int], records_max: int, bytes_max: int) -> PendingRequests:
        """Return the requests for these intervals; see `Store.read_requests`."""
        found: list[Request] = []
        size = 0
        for table in ("dead_letters", "late_records"):
            rows = self._dead() if table == "dead_letters" else self._late()
            wanted = [r for r in rows if r.interval_id in interval_ids and self._is_requested(r)]
            wanted.sort(key=lambda r: r.window is not None)
            for request in wanted[:records_max]:
                if size < bytes_max:
                    found.append(request)
                size += len(request.payload)
        releases = [release for release in self.releases if release.interval_id in interval_ids]
        return PendingRequests(tuple(found), frozenset(i for i in interval_ids if i in self.pauses), tuple(releases))

    def any_of(self, interval_ids: Sequence[int]) -> bool:
        """Tell whether there are requests for these intervals."""
        found = self.read_requests(interval_ids, 1, 1)
        return bool(found.requests or found.releases)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise unless every request that the checkpoint settles still exists."""
        gone = [s for s in checkpoint.outcomes if not self._is_requested(s.request)]
        if gone:
            raise RequestWithdrawnError(
                f"{len(gone)} of {len(checkpoint.outcomes)} replayed records have been withdrawn"
            )
        for outcome in checkpoint.outcomes:
            window = outcome.request.window
            if outcome.corrects and window is not None and self._row_of(window) != window.row:
                raise RequestWithdrawnError("the row of a finished window has changed")

    def apply(self, checkpoint: Checkpoint) -> None:
        """Apply the outcomes of the checkpoint's requests, and the pause of its source."""
        for outcome in checkpoint.outcomes:
            record = self.state_of(outcome.request.table, outcome.request.id)
            failed = outcome.dead_letter is not None or outcome.watermark is not None
            record.state = "open" if failed else "replayed"
            record.attempts += failed
            record.detail, record.recomputed = outcome.detail, None
            record.letter = outcome.dead_letter or record.letter
            if outcome.corrects and (window := outcome.request.window) is not None:
                self.corrections.append((outcome.request.id, window.row, None))
        self.releases = [r for r in self.releases if r.release_id not in checkpoint.release_ids]
        if checkpoint.pause is not None:
            self.pauses[checkpoint.grant.interval_id] = checkpoint.pause

    def expect(self, checkpoint: Checkpoint) -> None:
        """Remember the records that are to be added to windows that they are too late for."""
        interval_id = checkpoint.grant.interval_id
        made = self._database.headers[interval_id].graph_id, interval_id, checkpoint.bundle
        self.expected += [(*made, record) for record in checkpoint.expected]

    def append_late(self, interval_id: int, bundle: int, late: LateRows) -> None:
        """Request those of the newest late records that are expected, each once for each window.

        An expected record that the cursor has passed was in time: an equal one that comes later is another.
        """
        header = self._database.headers[interval_id]
        first = len(self._whole()) - len(late) + 1
        for row in range(len(late)):
            window = late.window_starts[row], late.window_ends[row]
            identity = (late.computation, late.input, late.event_times[row], late.payloads[row])
            for place, (of, producer, made, record) in enumerate(self.expected, 1):
                same = (record.computation, record.input, record.event_time, record.payload) == identity
                if of != header.graph_id or not same or window[0] is None or (late.retracts and late.retracts[row]):
                    continue
                read = header.cursors[producer][0] if producer in header.cursors else made
                if read >= made and (producer, made) != (interval_id, bundle):
                    continue
                if (place, window) not in self._met:
                    self._met.add((place, window))
                    state = self.state_of("late_records", first + row)
                    state.state, state.into_window, state.expected_id = "requested", True, place
                    break

    def _is_requested(self, request: Request) -> bool:
        record = self._states.get((request.table, request.id))
        return record is not None and record.state == "requested"

    def _dead(self) -> Iterator[Request]:
        for number, (interval_id, _, letter) in enumerate(self._database.dead_letters, start=1):
            record = self._states.get(("dead_letters", number), RequestState())
            yield Request(
                "dead_letters",
                number,
                interval_id,
                letter.stream,
                letter.computation,
                record.corrected or letter.payload,
                input=letter.input,
                wire=letter.wire,
                position=letter.position,
                event_time=letter.event_time,
                dedupe_id=letter.dedupe_id or (record.letter.dedupe_id if record.letter else None),
                retracts=letter.retracts,
                into_window=record.into_window,
            )

    def _whole(self) -> list[bool]:
        return [w for _, _, late in self._database.late_records for w in late.whole or [True] * len(late)]

    def _window(
        self, interval_id: int, late: LateRows, row: int, recomputed: tuple[bytes, bytes] | None
    ) -> PastWindow | None:
        start, end = late.window_starts[row], late.window_ends[row]
        if start is None or end is None:
            return None
        graph = self._database.graphs[self._database.headers[interval_id].graph_id]
        table_id = next(
            (
                graph.deployment.table_ids[table.name]
                for table in graph.spec.tables
                if table.computation == late.computation and table.kind == "windowed"
            ),
            None,
        )
        window = PastWindow(late.keys[row], start, end, late.whole[row] if late.whole else True, None, table_id)
        window = replace(window, row=self._row_of(window))
        if table_id is not None:
            window = replace(window, dropped_to=self._database.tables[table_id].dropped_to)
        if window.row is None:
            window = replace(window, overlapping=self._overlapping(window))
        if recomputed is not None:
            values, fits = recomputed[0], recomputed[1] == window.row
            window = replace(window, recomputed=values, recomputed_fits=fits)
        return window

    def correct(self, table: StoredTable, name: tuple[Any, ...], values: Mapping[str, Any]) -> bool:
        """Change values of the row of a finished window. Return False when it has none or is open.

        Args:
            table: the result table.
            name: the key and the window.
            values: the new values by column.
        """
        row = table.rows.get(name)
        if row is None:
            return False
        header, settings = self._database.headers[row["interval_id"]], self._settings_of(table)
        over_by = max(header.input_watermark - int(settings.get(LATENESS, 0)), header.horizon_floor)
        if not (row["window_end"] <= over_by and row["window_end"] <= header.low_watermark):
            return False
        history = table.history.get(name, [])
        pane = max([row["pane_index"], *(entry["pane_index"] for entry in history)]) + 1
        row.update(values, pane_index=pane)
        now_us = self._database.clock.now_us()
        if table.spec.retracts and history and not history[-1]["is_retraction"]:
            history.append({**history[-1], "emitted_at": now_us, "is_retraction": True})
        if table.spec.history:
            table.history.setdefault(name, []).append({**row, "emitted_at": now_us, "is_retraction": False})
        return True

    def _settings_of(self, table: StoredTable) -> Mapping[str, Any]:
        computations = self._database.graphs[table.graph_id].spec.computations
        return next(found.settings for found in computations if found.name == table.spec.computation)

    def _row_of(self, window: PastWindow) -> bytes | None:
        """Return the row of a window as JSON; None without one."""
        if window.table_id is None:
            return None
        table = self._database.tables[window.table_id]
        key = json.loads(window.key)
        name = (*(key if len(table.spec.keys) > 1 else [key]), window.start, window.end)
        row = table.rows.get(name)
        return None if row is None else json.dumps(row, default=_plain).encode()

    def _overlapping(self, window: PastWindow) -> tuple[tuple[bytes, int], ...]:
        """Return the first rows of the key whose windows intersect one."""
        if window.table_id is None:
            return ()
        table = self._database.tables[window.table_id]
        key = json.loads(window.key)
        keys = tuple(key) if len(table.spec.keys) > 1 else (key,)
        found = sorted(
            (row["window_start"], json.dumps(row, default=str).encode())
            for name, row in table.rows.items()
            if name[: len(keys)] == keys and row["window_start"] < window.end and window.start < row["window_end"]
        )
        return tuple((row, -1) for _, row in found[:2])

    def _late(self) -> Iterator[Request]:
        number = 0
        for interval_id, _, late in self._database.late_records:
            marks = late.retracts or [False] * len(late)
            columns = zip(late.payloads, late.event_times, marks, strict=True)
            for place, (payload, event_time, retracts) in enumerate(columns):
                number += 1
                state = self._states.get(("late_records", number))
                asks = state is not None and state.state == "requested" and state.into_window
                yield Request(
                    "late_records",
                    number,
                    interval_id,
                    late.stream,
                    late.computation,
                    payload,
                    input=late.input,
                    event_time=event_time,
                    retracts=retracts,
                    into_window=asks,
                    window=self._window(interval_id, late, place, state.recomputed) if asks and state else None,
                )


def _plain(value: object) -> int | str:
    """Return a value that JSON lacks as a number or text: PostgreSQL shows a whole numeric as a number."""
    if isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value():
        return int(value)
    return str(value)

"""The commit: one transaction for a whole turn, fenced by every grant in it (I1, I2).

    encode     checkpoints -> statements with arrays, data for COPY; pure, before any lock is taken
    send       BEGIN · fence · one statement per table · COMMIT, in a pipeline of one network round trip

In a pipeline, the statements behind the fence are sent before its answer is read; that is why the fence raises. COPY
cannot run in a pipeline: the fence and the appends then go first, in one round trip, and COPY and COMMIT follow.

Once COMMIT may have left this machine, a lost connection or a canceled task does not tell the outcome: the old backend
may still commit later. Only this case raises `CommitUnknownError`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import psycopg

from millpy.errors import CommitUnknownError, PaneOrderError, StoreUnavailableError, TransientError
from millpy.model.checkpoint import Checkpoint, DeletedRows, Kind, Segment, StoredSlice
from millpy.model.delta import encode_documents
from millpy.store.postgres import corrections, letters, requests
from millpy.store.postgres.arrays import Bigints, Byteas, Jsonbs, PgArray, Texts
from millpy.store.postgres.commit_pipeline import BEGIN, COMMIT, DURABLE, Command, send_commands
from millpy.store.postgres.connection import Channel, Connection
from millpy.store.postgres.errors import (
    SlotMovedError,
    altered_table_error,
    connection_lost,
    is_queue_full,
    translate,
    translate_commit,
)
from millpy.store.postgres.notices import record_notices
from millpy.store.postgres.outbox import append_outbox, settle_refused
from millpy.store.postgres.partitions import Times, is_key, is_missing, make_partitions, table_of
from millpy.store.postgres.results import (
    COPY_ROWS_MIN,
    Block,
    ResultTable,
    copy_data,
    delete_parameters,
    hours_needed,
    identity_parameters,
    insert_parameters,
    retract_parameters,
)
from millpy.store.postgres.sink_statements import SinkRun, runs_of, statement_error
from millpy.store.postgres.statement_runs import DEFERRED, ChangedSessionError, CommitProgress, StatementRunner
from millpy.store.postgres.statements import statement
from millpy.store.protocol import CommitFailpoint

ENCODE_APART_MIN = 2_000
"""A turn with more entries and rows than this is encoded in a thread, which keeps the event loop running."""
SLOT_ATTEMPTS_MAX = 5
STATEMENT_BYTES = 4_000_000
"""About this many bytes of deltas go into one statement, and of one interval into one document."""


@dataclass(slots=True)
class EncodedTurn:
    """A turn as statements and data. The slots of its logs are added when it is sent.

    Attributes:
        fence: parameters of the fence.
        logs: appends to the rings, which need a slot.
        appends: all other statements.
        copies: COPY statements with their data.
        statements: of each sink its statement, and the parameters of each run.
        firsts: statement -> its rows, for each statement whose rows must not exist yet.
        hours: number of a table with a retention -> the hours of its rows, which need partitions.
        lacked_partitions: whether a partition was missing when this was sent before.
    """

    fence: dict[str, Any]
    logs: list[Command]
    appends: list[Command]
    copies: list[tuple[bytes, bytes]]
    firsts: dict[bytes, list[Block]]
    statements: list[SinkRun]
    hours: dict[int, Times] = field(default_factory=dict)
    lacked_partitions: bool = False

    def may_renumber(self, table: ResultTable) -> bool:
        """Tell whether first panes may conflict with those of windows that had vanished before, and come back now."""
        assert table.history is not None, table.name
        renumbered = any(query == table.history.renumber for query, _ in self.appends)
        return not renumbered and bool(self._firsts_of(table))

    def renumber(self, table: ResultTable) -> None:
        """Renumber the panes that windows with first panes had before they vanished, before anything adds panes.

        Windows rarely come back: only a conflict pays for the search.
        """
        assert table.history is not None, table.name
        command: Command = (table.history.renumber, list(insert_parameters(table, self._firsts_of(table))))
        places = [place for place, (query, _) in enumerate(self.appends) if query == table.history.record]
        self.appends.insert(places[0] if places else len(self.appends), command)

    def _firsts_of(self, table: ResultTable) -> list[Block]:
        return [block for query in (table.insert, table.copy) for block in self.firsts.get(query, [])]


def encode_turn(
    checkpoints: Sequence[Checkpoint],
    graph_version: int,
    tables: dict[int, ResultTable],
    statements: Mapping[str, bytes],
) -> EncodedTurn:
    """Encode a turn as statements: one for each table, for all checkpoints in the order of their intervals.

    `statements` has the statement of each sink to SQL.
    """
    checkpoints = sorted(checkpoints, key=lambda c: c.grant.interval_id)
    ids = [c.grant.interval_id for c in checkpoints]
    assert len(set(ids)) == len(ids), ids
    fence = {
        "graph_version": graph_version,
        "intervals": Bigints(ids),
        "sequencers": Bigints([c.grant.sequencer for c in checkpoints]),
        "bundles": Bigints([c.bundle for c in checkpoints]),
        "input_watermarks": Bigints([c.input_watermark for c in checkpoints]),
        "low_watermarks": Bigints([c.low_watermark for c in checkpoints]),
        "oldest_works": Bigints([c.oldest_work for c in checkpoints]),
        "floors": Bigints([c.processing_floor for c in checkpoints]),
    }
    logs = [*_deltas(checkpoints), *_segments(checkpoints), *_dedupe_runs(checkpoints)]
    appends = [
        *requests.record_expected(checkpoints),
        *letters.append_late_records(checkpoints),  # some of them may be expected, by what the cursors have not passed
        *_cursors(checkpoints),
        *letters.append_dead_letters(checkpoints),
        *requests.record_outcomes(checkpoints),
        *requests.record_pauses(checkpoints),
        *_archive_files(checkpoints),
        *record_notices(checkpoints),
        *append_outbox(checkpoints),
        *settle_refused(checkpoints),
    ]
    inserts, copies, firsts = _results(checkpoints, tables)
    before, after = corrections.record(checkpoints, tables)
    # Corrections compare the rows before they are written, and note them after that. Nobody else writes their rows.
    appends += [*before, *inserts, *after]
    runs = runs_of(checkpoints, statements)
    return EncodedTurn(fence, logs, appends, copies, firsts, runs, _hours(checkpoints, tables))


def _hours(checkpoints: Sequence[Checkpoint], tables: dict[int, ResultTable]) -> dict[int, Times]:
    blocks: dict[int, list[Block]] = {}
    for c in checkpoints:
        for rows in c.results:
            if rows.count and tables[rows.table_id].time_place is not None:
                blocks.setdefault(rows.table_id, []).append(Block(rows, c.grant.interval_id, c.bundle))
    return {table_id: hours_needed(tables[table_id], found) for table_id, found in blocks.items()}


def _deltas(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    changed = [c for c in checkpoints if any(len(entries) for entries in c.delta)]
    if not changed:
        return []
    documents = [
        (c, part, document) for c in changed for part, document in enumerate(encode_documents(c.delta, STATEMENT_BYTES))
    ]
    return [
        (
            statement("append_deltas"),
            {
                "intervals": Bigints([c.grant.interval_id for c, _, _ in piece]),
                "bundles": Bigints([c.bundle for c, _, _ in piece]),
                "parts": Bigints([part for _, part, _ in piece]),
                "documents": Texts([document for _, _, document in piece]),
                "counters": Texts([_counters(c) for c, _, _ in piece]),
                "parks": Bigints([int(_parks(c)) for c, _, _ in piece]),
            },
        )
        for piece in _pieces(documents)
    ]


def _counters(checkpoint: Checkpoint) -> bytes | None:
    """Return all counters of an interval as JSON, counter -> subkey -> count."""
    if checkpoint.counters is None:
        return None
    found: dict[str, dict[str, int]] = {}
    for (name, subkey), count in checkpoint.counters.items():
        found.setdefault(name, {})[subkey] = count
    return msgspec.json.encode(found)


def _parks(checkpoint: Checkpoint) -> bool:
    return any(entries.kind is Kind.PARKED for entries in checkpoint.delta)


Document = tuple[Checkpoint, int, bytes]
"""(checkpoint, part, text)."""


def _pieces(documents: Sequence[Document]) -> list[list[Document]]:
    """Group documents by statement: about STATEMENT_BYTES each, at least one document."""
    pieces: list[list[Document]] = []
    size = STATEMENT_BYTES
    for document in documents:
        if size >= STATEMENT_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(document)
        size += len(document[2])
    return pieces


def _cursors(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    moved = [(c.grant.interval_id, cursor) for c in checkpoints for cursor in c.cursors]
    if not moved:
        return []
    parameters = {
        "consumers": Bigints([consumer for consumer, _ in moved]),
        "producers": Bigints([cursor.producer for _, cursor in moved]),
        "seqs": Bigints([cursor.seq for _, cursor in moved]),
        "watermarks": Bigints([cursor.watermark for _, cursor in moved]),
    }
    return [(statement("advance_cursors"), parameters)]


def _segments(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    written = [(c.grant.interval_id, segment) for c in checkpoints for segment in c.segments]
    if not written:
        return []
    segments = [segment for _, segment in written]
    parameters: dict[str, PgArray] = {
        "subscriptions": Bigints([s.subscription_id for s in segments]),
        "producers": Bigints([producer for producer, _ in written]),
        "seqs": Bigints([s.seq for s in segments]),
        "previous_seqs": Bigints([s.previous_seq for s in segments]),
        "watermarks": Bigints([s.watermark for s in segments]),
        "records": Texts([_literal([piece.records for piece in _slices(s)]) for s in segments]),
        "ends": Texts([_literal(np.cumsum([len(piece.payload) for piece in _slices(s)]).tolist()) for s in segments]),
        "checksums": Texts([_literal([piece.checksum for piece in _slices(s)]) for s in segments]),
        "event_time_los": Bigints([s.event_time_lo for s in segments]),
        "event_time_his": Bigints([s.event_time_hi for s in segments]),
        "payloads": Byteas([b"".join(piece.payload for piece in _slices(s)) for s in segments]),
    }
    return [(statement("append_segments"), parameters)]


_NO_SLICE = StoredSlice(0, b"", 0)


def _slices(segment: Segment) -> list[StoredSlice]:
    return [piece or _NO_SLICE for piece in segment.slices]


def _literal(numbers: Sequence[int]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"


def _dedupe_runs(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    runs = [(c.grant.interval_id, c.bundle, c.dedupe_run) for c in checkpoints if c.dedupe_run is not None]
    if not runs:
        return []
    parameters = {
        "intervals": Bigints([interval for interval, _, _ in runs]),
        "bundles": Bigints([bundle for _, bundle, _ in runs]),
        "expires_ats": Bigints([run.expires_at for _, _, run in runs]),
        "clocks": Bigints([run.clock for _, _, run in runs]),
        "ids": Byteas([run.ids for _, _, run in runs]),
        "times": Byteas([run.times for _, _, run in runs]),
        "wholes": Bigints([int(run.whole) for _, _, run in runs]),
    }
    return [(statement("append_dedupe_runs"), parameters)]


def _archive_files(checkpoints: Sequence[Checkpoint]) -> list[Command]:
    for c in checkpoints:  # a cursor must not pass records that no file has
        assert sum(map(len, c.archived)) == sum(file.records for file in c.files), c.grant
    files = [(c, file) for c in checkpoints for file in c.files]
    if not files:
        return []
    parameters = {
        "intervals": Bigints([c.grant.interval_id for c, _ in files]),
        "bundles": Bigints([c.bundle for c, _ in files]),
        "paths": Texts([file.path for _, file in files]),
        "counts": Bigints([file.records for _, file in files]),
        "sizes": Bigints([file.size for _, file in files]),
        "event_time_los": Bigints([file.event_time_lo for _, file in files]),
        "event_time_his": Bigints([file.event_time_hi for _, file in files]),
        "partitions": Jsonbs([msgspec.json.encode(file.partitions) for _, file in files]),
    }
    return [(statement("append_archive_files"), parameters)]


def _results(
    checkpoints: Sequence[Checkpoint], tables: dict[int, ResultTable]
) -> tuple[list[Command], list[tuple[bytes, bytes]], dict[bytes, list[Block]]]:
    groups: dict[tuple[int, bool], list[Block]] = {}
    for c in checkpoints:
        for rows in c.results:
            if rows.count:
                plain = rows.first or tables[rows.table_id].kind == "records"
                groups.setdefault((rows.table_id, plain), []).append(Block(rows, c.grant.interval_id, c.bundle))
    inserts: list[Command] = _deletes(checkpoints, tables)
    corrected = corrections.tables_of(checkpoints)  # their new rows are noted before COPY would write them
    copies: list[tuple[bytes, bytes]] = []
    firsts: dict[bytes, list[Block]] = {}
    for (table_id, plain), blocks in sorted(groups.items()):
        table = tables[table_id]
        count = sum(block.rows.count for block in blocks)
        if plain and table.copies and count >= COPY_ROWS_MIN and table_id not in corrected:
            pieces = copy_data(table, blocks)
            copies += [(table.copy, data) for data in pieces]
            firsts[table.copy] = blocks
            if table.history is not None:
                copies += [(table.history.copy, data) for data in pieces]
        elif plain:
            parameters = list(insert_parameters(table, blocks))
            inserts.append((table.insert, parameters))
            firsts[table.insert] = blocks
            if table.history is not None:
                inserts.append((table.history.record, parameters))
        else:
            parameters = list(insert_parameters(table, blocks))
            inserts.append((table.upsert, [*parameters, count]))
            if table.history is not None:
                inserts.append((table.history.record_later, parameters))
    return inserts, copies, firsts


def _deletes(checkpoints: Sequence[Checkpoint], tables: dict[int, ResultTable]) -> list[Command]:
    """Return the statements that delete rows of windows that are gone.

    They come before all that write rows: a window of a function may return in the same commit.
    """
    groups: dict[int, list[tuple[DeletedRows, int, int]]] = {}
    for c in checkpoints:
        for rows in c.deleted:
            groups.setdefault(rows.table_id, []).append((rows, c.grant.interval_id, c.bundle))
    found: list[Command] = []
    for table_id, parts in sorted(groups.items()):
        table = tables[table_id]
        found.append((table.delete, list(delete_parameters(table, [rows for rows, _, _ in parts]))))
        if table.history is not None:
            found.append((table.history.retract, list(retract_parameters(table, parts))))
    return found


def _work(checkpoints: Sequence[Checkpoint]) -> int:
    """Return the number of entries and rows to encode."""
    return sum(
        sum(len(entries) for entries in c.delta)
        + sum(rows.count for rows in c.results)
        + sum(rows.count for rows in c.deleted)
        + sum(len(late) for late in c.late)
        for c in checkpoints
    )


class Committer:
    """Sends turns on the commit channel, for `PostgresStore`."""

    def __init__(self, channel: Channel, tables: dict[int, ResultTable], statements: Mapping[str, bytes]) -> None:
        self._channel = channel
        self._tables = tables
        self._statements = statements
        self._slots: list[int] | None = None
        self.runner = StatementRunner()

    async def commit(
        self, checkpoints: Sequence[Checkpoint], graph_version: int, inside: CommitFailpoint | None, trial: bool
    ) -> None:
        """Commit a turn, or roll it back if it is a trial; see `Store.commit`."""
        if not checkpoints:
            return
        if _work(checkpoints) > ENCODE_APART_MIN:
            turn = await asyncio.to_thread(encode_turn, checkpoints, graph_version, self._tables, self._statements)
        else:
            turn = encode_turn(checkpoints, graph_version, self._tables, self._statements)
        for attempt in range(SLOT_ATTEMPTS_MAX):
            try:
                while (table := await self._send(turn, inside, trial)) is not None:
                    turn.renumber(table)
                return
            except SlotMovedError:
                # Nothing was committed: read the current slots, and send the turn again.
                self.forget_slots()
                if attempt == SLOT_ATTEMPTS_MAX - 1:
                    raise

    def forget_slots(self) -> None:
        """Read the slots again before the next commit, because the rings may have turned."""
        self._slots = None

    async def _send(self, turn: EncodedTurn, inside: CommitFailpoint | None, trial: bool) -> ResultTable | None:
        """Send a turn; return None, or the table whose history has panes of windows that have come back.

        Nothing is committed then: the turn has to renumber these panes.
        """
        sending = CommitProgress()
        try:
            async with self._channel.use_raw() as connection:
                slots = await self._current_slots(connection)
                await self._make_partitions(connection, turn)
                commands = _commands(turn, slots)
                if trial:
                    await self._send_in_parts(connection, commands, turn, inside, sending)
                    await send_commands(connection, [(DEFERRED, []), (b"ROLLBACK", [])], sending)
                elif inside is None and not (turn.copies or turn.statements):
                    sending.commit_sent = True
                    await send_commands(connection, [(BEGIN, []), *commands, (DURABLE, []), (COMMIT, [])], sending)
                else:
                    await self._send_in_parts(connection, commands, turn, inside, sending)
                    restoring = self.runner.restoring() if turn.statements else []
                    sending.commit_sent = True
                    found = await send_commands(connection, [(DURABLE, []), *restoring, (COMMIT, [])], sending)
                    if restoring and not (await found[-1].fetchone() or (True,))[-1]:
                        await self._channel.drop()  # triggers do not fire in its session any more
                        return None
                if self.runner.server_reports_change(connection):
                    await self._channel.drop()
        except psycopg.Error as error:
            return await self._react(error, turn, sending)
        except asyncio.CancelledError as cancelled:
            if sending.commit_sent:
                raise CommitUnknownError("the commit was cancelled after COMMIT was sent") from cancelled
            raise
        return None

    async def _react(self, error: psycopg.Error, turn: EncodedTurn, sending: CommitProgress) -> ResultTable:
        """Return the table whose history has panes of windows that have come back, or raise what the error means."""
        if is_queue_full(error):
            async with self._channel.use() as connection:
                await connection.execute(statement("read_queue_usage"))
        sink = next((run.sink for run in turn.statements if run.query == sending.failed_statement), "")
        if sink:
            if self.runner.begins_again(error, turn.statements):
                raise ChangedSessionError(f"the statement of sink {sink!r} failed") from error
            failed, sent = sending.failed_statement, sending.commit_sent
            raise await statement_error(self._channel, error, sink, failed, commit_sent=sent) from error
        if error.sqlstate and not connection_lost(error) and await self.runner.drop_if_changed(self._channel):
            self.runner.tell_change(error)
            raise ChangedSessionError(f"a trigger has changed the role or a setting of the session: {error}") from error
        table = next((t for t in self._tables.values() if sending.failed_statement in t.writes), None)
        if table is not None and table.time_place is not None and is_missing(error) and not turn.lacked_partitions:
            turn.lacked_partitions = True
            table.partitions.learn([])
            raise SlotMovedError(f"a partition of {table.name} was dropped") from error
        if table is not None and (error.diag.constraint_name == table.primary_key or is_key(error, history=False)):
            await self._refuse_twice(turn.firsts.get(sending.failed_statement, []), table)
        if (
            table is not None
            and table.history
            and (error.diag.constraint_name == table.history.primary_key or is_key(error, history=True))
        ):
            if turn.may_renumber(table):
                return table
            raise PaneOrderError(f"the history of {table.name} has a pane or retraction already") from error
        if table is not None and sending.failed_statement == table.copy and (error.sqlstate or "")[:2] in ("22", "54"):
            await self._refuse_altered(table)
        parent = self._tables.get(table_of(error) or 0)
        raise translate_commit(
            error,
            commit_sent=sending.commit_sent,
            users=table is not None or sending.failed_statement in (DEFERRED, COMMIT),
            table="" if table is None else table.name,
            parent="" if parent is None else parent.name,
        ) from error

    async def _make_partitions(self, connection: Connection, turn: EncodedTurn) -> None:
        """Make the partitions that the turn's rows need. They stay when the turn is not committed.

        Raises:
            ResultTableError: the table cannot have them.
        """
        for table_id, hours in turn.hours.items():
            table = self._tables[table_id]
            try:
                await make_partitions(connection, table_id, table.partitions, hours)
            except psycopg.Error as error:
                translated = translate(error)
                if isinstance(translated, TransientError | StoreUnavailableError):
                    raise translated from error
                detail = error.diag.message_primary or str(error)
                raise altered_table_error(table.name, f"it cannot have new partitions: {detail}") from error

    async def _refuse_twice(self, blocks: Sequence[Block], table: ResultTable) -> None:
        """Raise PaneOrderError when the interval that sends a first pane has already stored one (I7).

        Any other row with the same key is the user's.
        """
        if table.kind == "windowed" and blocks:
            async with self._channel.use() as connection:
                cursor = await connection.execute(table.find_own, identity_parameters(table, blocks))
                if (found := await cursor.fetchone()) is not None:
                    raise PaneOrderError(f"a first pane of {table.name} was already stored by bundle {found[0]}")

    async def _refuse_altered(self, table: ResultTable) -> None:
        """Raise ResultTableError when a column has another type than deployed: the server then misreads COPY's data."""
        types = {
            "relation": table.relation,
            "names": [column.name for column in table.columns],
            "types": [column.sql_type for column in table.columns],
        }
        async with self._channel.use() as connection:
            rows = await (await connection.execute(statement("find_altered"), types)).fetchall()
        if rows:
            raise altered_table_error(table.name, f"column {rows[0][0]} has another type")

    async def _send_in_parts(
        self,
        connection: Connection,
        commands: list[Command],
        turn: EncodedTurn,
        inside: CommitFailpoint | None,
        sending: CommitProgress,
    ) -> None:
        fence, *appends = commands
        if inside is None:
            await send_commands(connection, [(BEGIN, []), fence, *appends], sending)
        else:
            await send_commands(connection, [(BEGIN, []), fence], sending)
            await inside()
            if appends:
                await send_commands(connection, appends, sending)
        for copy_sql, data in turn.copies:
            sending.failed_statement = copy_sql
            try:
                async with connection.cursor() as cursor, cursor.copy(copy_sql) as copy:
                    await copy.write(memoryview(data))
            except psycopg.errors.FeatureNotSupported:
                # Row-level security applies to this role, so the retry of this turn uses INSERT.
                for table in self._tables.values():
                    table.copies = table.copies and copy_sql not in (table.copy, table.history and table.history.copy)
                raise

        await self.runner.run(connection, turn.statements, sending)

    async def _current_slots(self, connection: Connection) -> list[int]:
        if self._slots is None:
            try:
                rows = await (await connection.execute(statement("read_slots"))).fetchall()
            except psycopg.Error as error:
                raise translate(error) from error
            self._slots = [row[0] for row in rows]
        return self._slots


def _commands(turn: EncodedTurn, slots: list[int]) -> list[Command]:
    """Return the statements in their order: the fence, the logs, the check of the logs' slots, the other appends.

    `slots` are the current slots, in the alphabetical order of the rings.
    """
    dedupe_slot, delta_slot, segment_slot = slots
    slot_of = {
        statement("append_dedupe_runs"): dedupe_slot,
        statement("append_deltas"): delta_slot,
        statement("append_segments"): segment_slot,
    }
    commands: list[Command] = [(statement("hold_grants"), turn.fence)]
    for query, parameters in turn.logs:
        assert isinstance(parameters, dict)
        commands.append((query, parameters | {"slot": slot_of[query]}))
    if turn.logs:
        commands.append((statement("check_slots"), {"slots": _literal(slots)}))
    return commands + turn.appends

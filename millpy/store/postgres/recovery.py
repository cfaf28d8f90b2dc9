"""The reads of an owner: folded rows overlaid by the unfolded documents, in pieces of bounded size.

The read after a claim is not a transaction. The data of an interval changes only under its sequencer: by commits, which
this worker does not send while it reads, by folds, and by the next owner. So pieces that are read one after the other
form one state if sequencer, bundle and folded bundle are the same before and after. If only a fold of this worker came
in between, the read is repeated. The read neither pins a snapshot nor keeps a slot, however long it takes.

State on demand is read while commits and folds continue: in one REPEATABLE READ transaction that locks `mill.deltas`
first, because a snapshot does not protect documents from the TRUNCATE that frees a slot.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from psycopg.rows import TupleRow

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import DedupeRun, Delta, Entries, Grant, Kind, OutboxState
from millpy.model.delta import decode_document
from millpy.model.stage import UNBOUNDED, StoredInterval
from millpy.model.stored_windows import ClosedKind
from millpy.model.time import Instant
from millpy.store.postgres import outbox, stored_sessions, stored_windows
from millpy.store.postgres.arrays import Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import OwnerSnapshot

ENTRY_BYTES = 500
"""Memory that an entry takes in addition to its texts."""
OVERLAYS_BYTES_MAX = 256_000_000
"""Text of unfolded state that is kept for loading on demand. The data of the last load is kept in any case."""
PIECE_ROWS = 20_000
PIECE_BYTES = 4_000_000
"""Bytes that one statement reads; a single row, document or run may be larger."""
PARTS_MAX = 2**31 - 1
"""More documents than any bundle has."""
LOAD_KEYS = 1_000
PRELOAD_BYTES_MAX = 128_000_000
"""An interval with more state than this is loaded on demand, even if it has few rows."""
_OTHERS = (("", "state"), ("state\x01", "\x7f"))
"""Ranges [from, to) of the names of all kinds but STATE."""
_WITHOUT_WINDOWS = (("", "state"), ("state\x01", "window"), ("window\x01", "\x7f"))
_STATE = ("state", "state\x01")
_OF_SESSIONS = (ClosedKind.SESSIONS, ClosedKind.UNFIRED_SESSIONS)
_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_MAY_IDLE = b"SET LOCAL idle_in_transaction_session_timeout = '60s'"
"""The transaction does not block writers, and over a slow link the server idles while this worker receives."""

EntryId = tuple[str, str, bytes, str]
"""(kind, namespace, key, subkey)."""
Newest = dict[EntryId, tuple[int, bytes | None, int]]
"""EntryId -> (key hash, value or None for a tombstone, fire_at)."""
Groups = dict[tuple[str, str], list[Entries]]
"""(kind, namespace) -> entries in parts of about PIECE_ROWS, so that a reader can free the parts one by one."""


async def read(
    connection: Connection,
    grants: Sequence[Grant],
    state_rows_max: int,
    closed_rows_max: int,
    closed: ClosedKind,
    progressed: Callable[[], None],
) -> list[OwnerSnapshot]:
    """Read the stored data of owned intervals; see `Store.read`. `progressed` is called after each piece."""
    bounds = _ReadBounds(state_rows_max, closed_rows_max, closed)
    return [await _read_one(connection, grant, bounds, progressed) for grant in grants]


class _ReadBounds(NamedTuple):
    """The bounds of `Store.read`."""

    state_rows_max: int
    closed_rows_max: int
    closed: ClosedKind


async def _read_one(
    connection: Connection, grant: Grant, bounds: _ReadBounds, progressed: Callable[[], None]
) -> OwnerSnapshot:
    header = await _header(connection, grant)
    while True:
        opened = await _read_under(connection, grant, header, bounds, progressed)
        before, header = header, await _header(connection, grant)
        if header == before:
            return opened


async def _header(connection: Connection, grant: Grant) -> TupleRow:
    """Read the header of a grant. Raises StaleSequencerError."""
    found = await all_rows(connection, statement("read_header"), {"interval": grant.interval_id})
    if not found or found[0][0] != grant.sequencer:
        raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
    return found[0]


async def _read_under(
    connection: Connection, grant: Grant, header: TupleRow, bounds: _ReadBounds, progressed: Callable[[], None]
) -> OwnerSnapshot:
    """Read the data under a header. It is valid if the header is still the same afterwards."""
    _, bundle, folded_bundle, input_watermark, low_watermark, processing_floor, horizon_floor, fired_by = header
    state_rows_max, closed_rows_max, kind = bounds
    of_interval: dict[str, Any] = {"interval": grant.interval_id, "rows_max": state_rows_max}
    newest, unfolded_bytes = Newest(), 0
    async for documents in _documents(connection, grant.interval_id, folded_bundle, bundle):
        for _, document, _, _ in documents:
            _overlay(newest, decode_document(document))
            unfolded_bytes += len(document.encode())
        progressed()
    ((states, has_outbox),) = await all_rows(connection, statement("count_state"), of_interval)
    groups: Groups = {}
    subkeys, left = None, None
    if may_leave := kind in _OF_SESSIONS and closed_rows_max < UNBOUNDED:
        ended_by = input_watermark if kind is ClosedKind.UNFIRED_SESSIONS else None
        left = await stored_sessions.left(connection, grant, fired_by, ended_by, closed_rows_max)
    elif closed_rows_max < UNBOUNDED:
        subkeys = await stored_windows.subkeys(connection, grant, closed_rows_max)
    closed_ones, others = _by_end(subkeys or (), fired_by)
    unfired = others if kind in (ClosedKind.UNFIRED, ClosedKind.UNFIRED_PANES) else []
    may_wait = kind is ClosedKind.UNFIRED_PANES and bool(closed_ones)
    for subkey in others if kind is ClosedKind.WINDOWS else ():
        await _add_windows(stored_windows.read_window(connection, grant, subkey), newest, groups, progressed)
    if (left is not None and kind is ClosedKind.SESSIONS) or (subkeys is not None and kind is ClosedKind.PANES):
        await _add_windows(stored_sessions.read_open(connection, grant, fired_by), newest, groups, progressed)
    for kinds in _OTHERS if subkeys is None and left is None else _WITHOUT_WINDOWS:
        await _read_kinds(connection, grant.interval_id, kinds, newest, groups, progressed)
    complete = states + _states(newest) <= state_rows_max
    if complete and states:
        complete = await _read_kinds(
            connection, grant.interval_id, _STATE, newest, groups, progressed, PRELOAD_BYTES_MAX
        )
    cursors = await all_rows(connection, statement("read_cursors"), of_interval)
    last_segments = await all_rows(connection, statement("read_last_segments"), of_interval)
    return OwnerSnapshot(
        recovered=StoredInterval(
            interval_id=grant.interval_id,
            sequencer=grant.sequencer,
            bundle=bundle,
            folded_bundle=folded_bundle,
            input_watermark=Instant(input_watermark),
            low_watermark=Instant(low_watermark),
            processing_floor=Instant(processing_floor),
            entries=_entries(newest, groups, complete, tombstones=may_leave or bool(unfired) or may_wait),
            state_complete=complete,
            horizon_floor=Instant(horizon_floor),
            closed_windows=closed_ones,
            unfired_windows=unfired,
            outbox=await outbox.read_state(connection, grant) if has_outbox else OutboxState(),
            **({} if left is None else left._asdict()),
        ),
        cursors={producer: (seq, Instant(watermark)) for producer, seq, watermark in cursors},
        last_segments=dict(last_segments),
        unfolded_bytes=unfolded_bytes,
    )


def _by_end(subkeys: Sequence[str], upto: int) -> tuple[list[str], list[str]]:
    """Return the windows that end by a time, and the others."""
    ended = {subkey: int(subkey.partition("/")[2]) <= upto for subkey in subkeys}
    return [subkey for subkey, is_over in ended.items() if is_over], [s for s, is_over in ended.items() if not is_over]


async def _documents(connection: Connection, interval_id: int, after: int, upto: int) -> AsyncIterator[list[TupleRow]]:
    """Yield documents of bundles in (after, upto], oldest first, in pieces of (bundle, text, part, documents left)."""
    span = {"interval": interval_id, "after": after, "after_part": PARTS_MAX, "upto": upto, "bytes_max": PIECE_BYTES}
    while after < upto:
        documents = await all_rows(connection, statement("read_deltas"), span)
        if documents:
            yield documents
        if not documents or len(documents) == documents[-1][3]:
            return
        span |= {"after": documents[-1][0], "after_part": documents[-1][2]}


async def _read_kinds(
    connection: Connection,
    interval_id: int,
    kinds: tuple[str, str],
    newest: Newest,
    groups: Groups,
    progressed: Callable[[], None],
    bytes_max: int | None = None,
) -> bool:
    """Add the folded rows that no document overlays to `groups`. Stop and return False beyond bytes_max."""
    place: dict[str, Any] = {"interval": interval_id, "rows_max": PIECE_ROWS, "bytes_max": PIECE_BYTES}
    kind, place["kind_end"] = kinds
    place |= {"kind": kind, "text_hash": -(2**63), "namespace": "", "subkey_hash": -(2**63), "key_hash": -1}
    size = 0
    subkeys: dict[str, str] = {}
    instants: dict[int, int] = {}
    while True:
        rows = await all_rows(connection, statement("read_keyed"), place)
        progressed()
        for kind, namespace, key, subkey, key_hash, fire_at, value, _, _, _ in rows:
            name = key.encode()
            size += len(value)
            if newest and (kind, namespace, name, subkey) in newest:
                continue
            subkey, fire_at = subkeys.setdefault(subkey, subkey), instants.setdefault(fire_at, fire_at)
            _group(groups, kind, namespace).add(name, key_hash, subkey, value.encode(), fire_at)
        if bytes_max is not None and size > bytes_max:
            return False
        if not rows or len(rows) == rows[-1][-1] < PIECE_ROWS:
            return True
        kind, namespace, _, _, key_hash, _, _, text_hash, subkey_hash, _ = rows[-1]
        place |= {"kind": kind, "text_hash": text_hash, "namespace": namespace, "subkey_hash": subkey_hash}
        place["key_hash"] = key_hash
        if max(len(subkeys), len(instants)) > PIECE_ROWS:
            subkeys.clear()
            instants.clear()


async def _add_windows(
    pieces: AsyncIterator[list[TupleRow]], newest: Newest, groups: Groups, progressed: Callable[[], None]
) -> None:
    """Add the folded rows of windows that no document overlays to `groups`."""
    kind = Kind.WINDOW.value
    async for rows in pieces:
        progressed()
        for subkey, key, key_hash, fire_at, value, *_ in rows:
            name = key.encode()
            if (kind, "", name, subkey) not in newest:
                _group(groups, kind, "").add(name, key_hash, subkey, value.encode(), fire_at)


def _group(groups: Groups, kind: str, namespace: str) -> Entries:
    """Return the part that takes the next entry."""
    of_name = groups.setdefault((kind, namespace), [])
    if not of_name or len(of_name[-1]) >= PIECE_ROWS:
        of_name.append(Entries(Kind(kind), namespace))
    return of_name[-1]


def _overlay(newest: Newest, delta: Delta) -> None:
    """Replace the entries of a document in `newest`."""
    for entries in delta:
        kind, namespace = entries.kind.value, entries.namespace
        for key, hashed, subkey, value, fire_at in zip(
            entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats, strict=True
        ):
            newest[kind, namespace, key, subkey] = (hashed, value, fire_at)


def _states(newest: Newest) -> int:
    """Count the cells of state that are not deleted."""
    return sum(1 for identity, (_, value, _) in newest.items() if identity[0] == "state" and value is not None)


def _entries(
    newest: Newest, groups: Groups, with_state: bool = True, *, tombstones: bool = False
) -> tuple[Entries, ...]:
    """Add the entries of documents to the groups of folded rows. Return all groups.

    Tombstones are left out, except those of windows if they are asked for.
    """
    for (kind, namespace, key, subkey), (hashed, value, fire_at) in newest.items():
        if value is not None or (tombstones and kind == "window"):
            _group(groups, kind, namespace).add(key, hashed, subkey, value, fire_at)
    return tuple(part for (kind, _), of_name in groups.items() if with_state or kind != "state" for part in of_name)


class StateReader:
    """Loads state on demand. It remembers the decoded unfolded documents of each grant."""

    def __init__(self) -> None:
        self._overlays: OrderedDict[Grant, _UnfoldedState] = OrderedDict()

    async def load(self, connection: Connection, grant: Grant, keys: Sequence[bytes]) -> tuple[Entries, ...]:
        """Read the STATE entries of some keys; see `Store.load_state`."""
        seen, forgotten, by_key, size = self._overlays.pop(grant, _UnfoldedState(0, 0, {}, 0))
        of_grant: dict[str, Any] = {"interval": grant.interval_id, "sequencer": grant.sequencer}
        await connection.execute(_BEGIN)
        await connection.execute(_MAY_IDLE)
        await connection.execute(statement("lock_deltas"))
        header = await all_rows(connection, statement("read_folded_bundle"), of_grant)
        if not header:
            await connection.execute(b"ROLLBACK")
            raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
        bundle, folded = header[0]
        async for documents in _documents(connection, grant.interval_id, max(folded, seen), bundle):
            for at, document, _, _ in documents:
                size += _remember(by_key, at, decode_document(document))
        rows: list[TupleRow] = []
        for start in range(0, len(keys), LOAD_KEYS):
            of_keys = {"interval": grant.interval_id, "keys": Texts(keys[start : start + LOAD_KEYS])}
            rows += await all_rows(connection, statement("load_state"), of_keys)
        await connection.execute(b"COMMIT")

        if folded > forgotten:
            by_key, size = _forget(by_key, folded)
        self._overlays[grant] = _UnfoldedState(bundle, folded, by_key, size)
        while len(self._overlays) > 1 and sum(kept.size for kept in self._overlays.values()) > OVERLAYS_BYTES_MAX:
            self._overlays.popitem(last=False)
        merged: Newest = {
            ("state", namespace, key.encode(), subkey): (hashed, value.encode(), fire_at)
            for namespace, key, subkey, hashed, fire_at, value in rows
        }
        for key in keys:
            for identity, (_, hashed, value, fire_at) in by_key.get(key, {}).items():
                merged[identity] = (hashed, value, fire_at)
        return _entries(merged, {})

    def forget(self) -> None:
        """Drop all remembered documents. A worker calls this when its grants may have changed hands."""
        self._overlays.clear()


_Overlay = dict[bytes, dict[EntryId, tuple[int, int, bytes | None, int]]]


class _UnfoldedState(NamedTuple):
    """The unfolded state of bundles in (folded, upto], and about how many bytes it takes."""

    upto: int
    folded: int
    by_key: _Overlay
    size: int


def _remember(by_key: _Overlay, bundle: int, delta: Delta) -> int:
    """Add the state of a document to the overlay. Return about how many bytes it grew by."""
    size = 0
    for entries in delta:
        if entries.kind is not Kind.STATE:
            continue
        for key, hashed, subkey, value, fire_at in zip(
            entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats, strict=True
        ):
            of_key, identity = by_key.setdefault(key, {}), ("state", entries.namespace, key, subkey)
            before = of_key.get(identity)
            size += _size(key, value) - (0 if before is None else _size(key, before[2]))
            of_key[identity] = (bundle, hashed, value, fire_at)
    return size


def _size(key: bytes, value: bytes | None) -> int:
    return ENTRY_BYTES + len(key) + len(value or b"")


def _forget(by_key: _Overlay, folded: int) -> tuple[_Overlay, int]:
    """Return the overlay without folded state, and its size in bytes."""
    kept: _Overlay = {}
    size = 0
    for key, entries in by_key.items():
        unfolded = {identity: entry for identity, entry in entries.items() if entry[0] > folded}
        if unfolded:
            kept[key] = unfolded
            size += sum(_size(key, entry[2]) for entry in unfolded.values())
    return kept, size


async def load_dedupe_runs(connection: Connection, grant: Grant, progressed: Callable[[], None]) -> list[DedupeRun]:
    """Read the dedupe runs within the horizon, oldest first, in pieces. `progressed` is called after each piece.

    Pieces need no common snapshot: a slot that is emptied in between holds no run within the horizon.
    """
    place: dict[str, Any] = {"interval": grant.interval_id, "rows_max": PIECE_ROWS, "bytes_max": PIECE_BYTES}
    ((clock, whole),) = await all_rows(connection, statement("read_dedupe_bounds"), place)
    place |= {"clock": clock, "after": (whole or 0) - 1}
    found: list[DedupeRun] = []
    while rows := await all_rows(connection, statement("read_dedupe_runs"), place):
        found += [
            DedupeRun(ids, times, Instant(expires_at), Instant(clock), whole)
            for _, ids, times, expires_at, clock, whole in rows
        ]
        place["after"] = rows[-1][0]
        progressed()
    return found

"""What an owner reads: folded rows overlaid by the documents that are not folded yet, in pieces of bounded size.

Reading after a claim is no transaction. What belongs to an interval changes only under its sequencer: by commits, which
this worker does not send while it reads, by folding, and by whoever owns the interval next. So pieces that are read one
after the other are one state, if sequencer, bundle and folded bundle are the same before and after; if only a fold of
our own came between, it is read again. No snapshot is pinned and no slot is kept for as long as that takes.

State on demand is read while commits and folds go on: one REPEATABLE READ transaction that locks `mill.deltas` first,
because freeing a slot empties documents behind a snapshot's back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from psycopg.rows import TupleRow

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import DedupeRun, Delta, Entries, Grant, Kind
from millpy.model.delta import decode_document
from millpy.model.stage import Recovered
from millpy.model.time import Instant
from millpy.store.postgres.arrays import Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import Opened

ENTRY_BYTES = 500
"""What an entry costs in memory beside its texts."""
OVERLAYS_BYTES_MAX = 256_000_000
"""Text of unfolded state that is remembered for loading on demand; what the last load needed is kept in any case."""
PIECE_ROWS = 20_000
PIECE_BYTES = 4_000_000
"""What one statement reads; a single row, document or run may have more."""
PARTS_MAX = 2**31 - 1
"""No bundle has so many documents."""
LOAD_KEYS = 1_000
PRELOAD_BYTES_MAX = 128_000_000
"""An interval with more state than this is loaded on demand, however few its rows."""
_OTHERS = (("", "state"), ("state\x01", "\x7f"))
"""[from, to) of the names of kinds: all but STATE."""
_STATE = ("state", "state\x01")
_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"
_MAY_IDLE = b"SET LOCAL idle_in_transaction_session_timeout = '60s'"
"""It locks nothing that others write to, and a slow link has the server wait while we receive."""

Identity = tuple[str, str, bytes, str]
"""(kind, namespace, key, subkey)."""
Newest = dict[Identity, tuple[int, bytes | None, int]]
"""Identity -> (key hash, value or None for a tombstone, fire_at)."""
Groups = dict[tuple[str, str], list[Entries]]
"""(kind, namespace) -> entries, about PIECE_ROWS together: whoever takes them in one by one can let them go."""


async def read(
    connection: Connection, grants: Sequence[Grant], state_rows_max: int, progressed: Callable[[], None]
) -> list[Opened]:
    """Everything an owner needs; see `Store.read`. `progressed` is called after each piece."""
    return [await _read_one(connection, grant, state_rows_max, progressed) for grant in grants]


async def _read_one(
    connection: Connection, grant: Grant, state_rows_max: int, progressed: Callable[[], None]
) -> Opened:
    header = await _header(connection, grant)
    while True:
        opened = await _read_under(connection, grant, header, state_rows_max, progressed)
        before, header = header, await _header(connection, grant)
        if header == before:
            return opened


async def _header(connection: Connection, grant: Grant) -> TupleRow:
    """Raises StaleSequencerError."""
    found = await all_rows(connection, statement("read_header"), {"interval": grant.interval_id})
    if not found or found[0][0] != grant.sequencer:
        raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
    return found[0]


async def _read_under(
    connection: Connection, grant: Grant, header: TupleRow, state_rows_max: int, progressed: Callable[[], None]
) -> Opened:
    """What belongs to a header, if that is still the same afterwards."""
    _, bundle, folded_bundle, input_watermark, low_watermark, processing_floor = header
    of_interval: dict[str, Any] = {"interval": grant.interval_id}
    newest: Newest = {}
    unfolded_bytes = 0
    async for documents in _documents(connection, grant.interval_id, folded_bundle, bundle):
        for _, document, _, _ in documents:
            _overlay(newest, decode_document(document))
            unfolded_bytes += len(document.encode())
        progressed()
    ((states,),) = await all_rows(connection, statement("count_state"), of_interval | {"rows_max": state_rows_max})
    groups: Groups = {}
    for kinds in _OTHERS:
        await _read_kinds(connection, grant.interval_id, kinds, newest, groups, progressed)
    complete = states + _states(newest) <= state_rows_max
    if complete and states:
        complete = await _read_kinds(
            connection, grant.interval_id, _STATE, newest, groups, progressed, PRELOAD_BYTES_MAX
        )
    cursors = await all_rows(connection, statement("read_cursors"), of_interval)
    last_segments = await all_rows(connection, statement("read_last_segments"), of_interval)
    return Opened(
        recovered=Recovered(
            interval_id=grant.interval_id,
            sequencer=grant.sequencer,
            bundle=bundle,
            folded_bundle=folded_bundle,
            input_watermark=Instant(input_watermark),
            low_watermark=Instant(low_watermark),
            processing_floor=Instant(processing_floor),
            entries=_entries(newest, groups, complete),
            state_complete=complete,
        ),
        cursors={producer: (seq, Instant(watermark)) for producer, seq, watermark in cursors},
        last_segments=dict(last_segments),
        unfolded_bytes=unfolded_bytes,
    )


async def _documents(connection: Connection, interval_id: int, after: int, upto: int) -> AsyncIterator[list[TupleRow]]:
    """Documents of bundles in (after, upto], oldest first, in pieces of (bundle, text, part, how many are left)."""
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
    """Folded rows that no document overlays; False when they have more than bytes_max."""
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


def _group(groups: Groups, kind: str, namespace: str) -> Entries:
    """Where the next entry goes."""
    of_name = groups.setdefault((kind, namespace), [])
    if not of_name or len(of_name[-1]) >= PIECE_ROWS:
        of_name.append(Entries(Kind(kind), namespace))
    return of_name[-1]


def _overlay(newest: Newest, delta: Delta) -> None:
    for entries in delta:
        kind, namespace = entries.kind.value, entries.namespace
        for key, hashed, subkey, value, fire_at in zip(
            entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats, strict=True
        ):
            newest[kind, namespace, key, subkey] = (hashed, value, fire_at)


def _states(newest: Newest) -> int:
    return sum(1 for identity, (_, value, _) in newest.items() if identity[0] == "state" and value is not None)


def _entries(newest: Newest, groups: Groups, with_state: bool = True) -> tuple[Entries, ...]:
    """By kind and namespace, those of documents with the rows that they do not overlay; tombstones left out."""
    for (kind, namespace, key, subkey), (hashed, value, fire_at) in newest.items():
        if value is not None:
            _group(groups, kind, namespace).add(key, hashed, subkey, value, fire_at)
    return tuple(part for (kind, _), of_name in groups.items() if with_state or kind != "state" for part in of_name)


class StateReader:
    """Loads state on demand. Remembers the unfolded documents of each grant, decoded once."""

    def __init__(self) -> None:
        self._overlays: OrderedDict[Grant, tuple[int, _Overlay, int]] = OrderedDict()

    async def load(self, connection: Connection, grant: Grant, keys: Sequence[bytes]) -> tuple[Entries, ...]:
        """STATE entries of some keys; see `Store.load_state`."""
        seen, by_key, size = self._overlays.pop(grant, (0, {}, 0))
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
            asked = {"interval": grant.interval_id, "keys": Texts(keys[start : start + LOAD_KEYS])}
            rows += await all_rows(connection, statement("load_state"), asked)
        await connection.execute(b"COMMIT")

        if folded > 0:
            by_key, size = _forget(by_key, folded)
        self._overlays[grant] = (bundle, by_key, size)
        while len(self._overlays) > 1 and sum(kept[2] for kept in self._overlays.values()) > OVERLAYS_BYTES_MAX:
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
        """Grants have changed hands: drop everything."""
        self._overlays.clear()


_Overlay = dict[bytes, dict[Identity, tuple[int, int, bytes | None, int]]]


def _remember(by_key: _Overlay, bundle: int, delta: Delta) -> int:
    """Take a document's state in; about how many bytes that is more."""
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
    """Without what is in rows by now, and its bytes."""
    kept: _Overlay = {}
    size = 0
    for key, entries in by_key.items():
        unfolded = {identity: entry for identity, entry in entries.items() if entry[0] > folded}
        if unfolded:
            kept[key] = unfolded
            size += sum(_size(key, entry[2]) for entry in unfolded.values())
    return kept, size


async def load_dedupe_runs(connection: Connection, grant: Grant, progressed: Callable[[], None]) -> list[DedupeRun]:
    """Runs within the horizon, oldest first; in pieces, each of which is told to `progressed`.

    A slot that is emptied between two pieces has none that matters.
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

"""What an owner reads: folded rows overlaid by the documents that are not folded yet.

Every read is one REPEATABLE READ transaction that locks `mill.deltas` first: folding moves things from documents to
rows, and freeing a slot empties documents behind a snapshot's back. One snapshot under that lock sees each change
in exactly one of the two places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from psycopg.rows import TupleRow

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import DedupeRun, Delta, Entries, Grant, Kind
from millpy.model.delta import decode_document
from millpy.model.stage import Recovered
from millpy.model.time import Instant
from millpy.store.postgres.arrays import Bigints, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement
from millpy.store.protocol import Opened

OVERLAYS_MAX = 64
_BEGIN = b"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY"

Identity = tuple[str, str, bytes, str]
"""(kind, namespace, key, subkey)."""
Newest = dict[Identity, tuple[int, bytes | None, int]]
"""Identity -> (key hash, value or None for a tombstone, fire_at)."""


async def read(connection: Connection, grants: Sequence[Grant], state_rows_max: int) -> list[Opened]:
    """Everything an owner needs; see `Store.read`."""
    ids = [g.interval_id for g in grants]
    of_intervals: dict[str, Any] = {"intervals": Bigints(ids)}
    await connection.execute(_BEGIN)
    await connection.execute(statement("lock_deltas"))
    header_rows = await all_rows(
        connection, statement("read_headers"), of_intervals | {"state_rows_max": state_rows_max}
    )
    headers = {row[0]: row for row in header_rows}
    stale = [g.interval_id for g in grants if g.interval_id not in headers or headers[g.interval_id][1] != g.sequencer]
    if stale:
        await connection.execute(b"ROLLBACK")
        raise StaleSequencerError(f"stale grants {stale}", stale=stale)
    documents = await all_rows(connection, statement("read_deltas"), of_intervals | {"afters": Bigints([0] * len(ids))})
    newest, unfolded_bytes = _newest_by_interval(documents)
    with_state = [i for i in ids if headers[i][7] + _states(newest.get(i, {})) <= state_rows_max]
    folded = await all_rows(connection, statement("read_keyed"), of_intervals | {"with_state": Bigints(with_state)})
    cursors = await all_rows(connection, statement("read_cursors"), of_intervals)
    last_segments = await all_rows(connection, statement("read_last_segments"), of_intervals)
    await connection.execute(b"COMMIT")

    rows_of: dict[int, list[TupleRow]] = {}
    for row in folded:
        rows_of.setdefault(row[0], []).append(row[1:])
    return [
        Opened(
            recovered=_recovered(headers[i], rows_of.get(i, []), newest.get(i, {}), i in with_state),
            cursors={
                producer: (seq, Instant(watermark)) for consumer, producer, seq, watermark in cursors if consumer == i
            },
            last_segments={subscription: seq for producer, subscription, seq in last_segments if producer == i},
            unfolded_bytes=unfolded_bytes.get(i, 0),
        )
        for i in ids
    ]


def _newest_by_interval(documents: Iterable[TupleRow]) -> tuple[dict[int, Newest], dict[int, int]]:
    newest: dict[int, Newest] = {}
    sizes: dict[int, int] = {}
    for interval_id, _, document in documents:
        _overlay(newest.setdefault(interval_id, {}), decode_document(document))
        sizes[interval_id] = sizes.get(interval_id, 0) + len(document.encode())
    return newest, sizes


def _overlay(newest: Newest, delta: Delta) -> None:
    for entries in delta:
        kind, namespace = entries.kind.value, entries.namespace
        for key, hashed, subkey, value, fire_at in zip(
            entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats, strict=True
        ):
            newest[kind, namespace, key, subkey] = (hashed, value, fire_at)


def _states(newest: Newest) -> int:
    return sum(1 for identity, (_, value, _) in newest.items() if identity[0] == "state" and value is not None)


def _recovered(header: TupleRow, rows: Sequence[TupleRow], newest: Newest, with_state: bool) -> Recovered:
    interval_id, sequencer, bundle, folded_bundle, input_watermark, low_watermark, processing_floor, _ = header
    merged: Newest = {
        (kind, namespace, key.encode(), subkey): (hashed, value.encode(), fire_at)
        for kind, namespace, key, subkey, hashed, fire_at, value in rows
    }
    merged.update(newest)
    if not with_state:
        merged = {identity: entry for identity, entry in merged.items() if identity[0] != "state"}
    return Recovered(
        interval_id=interval_id,
        sequencer=sequencer,
        bundle=bundle,
        folded_bundle=folded_bundle,
        input_watermark=Instant(input_watermark),
        low_watermark=Instant(low_watermark),
        processing_floor=Instant(processing_floor),
        entries=_entries(merged),
        state_complete=with_state,
    )


def _entries(newest: Newest) -> tuple[Entries, ...]:
    """By kind and namespace, tombstones left out."""
    groups: dict[tuple[str, str], Entries] = {}
    for (kind, namespace, key, subkey), (hashed, value, fire_at) in newest.items():
        if value is not None:
            group = groups.get((kind, namespace))
            if group is None:
                group = groups[kind, namespace] = Entries(Kind(kind), namespace)
            group.add(key, hashed, subkey, value, fire_at)
    return tuple(groups.values())


class StateReader:
    """Loads state on demand. Remembers the unfolded documents of each grant, decoded once."""

    def __init__(self) -> None:
        self._overlays: OrderedDict[Grant, tuple[int, dict[bytes, dict[Identity, tuple[int, int, bytes | None, int]]]]]
        self._overlays = OrderedDict()

    async def load(self, connection: Connection, grant: Grant, keys: Sequence[bytes]) -> tuple[Entries, ...]:
        """STATE entries of some keys; see `Store.load_state`."""
        seen, by_key = self._overlays.pop(grant, (0, {}))
        of_grant: dict[str, Any] = {"interval": grant.interval_id, "sequencer": grant.sequencer}
        await connection.execute(_BEGIN)
        await connection.execute(statement("lock_deltas"))
        header = await all_rows(connection, statement("read_folded_bundle"), of_grant)
        if not header:
            await connection.execute(b"ROLLBACK")
            raise StaleSequencerError(f"stale grants {[grant.interval_id]}", stale=[grant.interval_id])
        bundle, folded = header[0]
        documents: list[TupleRow] = []
        if bundle > max(folded, seen):
            afters = {"intervals": Bigints([grant.interval_id]), "afters": Bigints([seen])}
            documents = await all_rows(connection, statement("read_deltas"), afters)
        rows = await all_rows(connection, statement("load_state"), {"interval": grant.interval_id, "keys": Texts(keys)})
        await connection.execute(b"COMMIT")

        for _, at, document in documents:
            _remember(by_key, at, decode_document(document))
        if folded > 0:
            by_key = _forget(by_key, folded)
        self._overlays[grant] = (bundle, by_key)
        while len(self._overlays) > OVERLAYS_MAX:
            self._overlays.popitem(last=False)
        merged: Newest = {
            ("state", namespace, key.encode(), subkey): (hashed, value.encode(), fire_at)
            for namespace, key, subkey, hashed, fire_at, value in rows
        }
        for key in keys:
            for identity, (_, hashed, value, fire_at) in by_key.get(key, {}).items():
                merged[identity] = (hashed, value, fire_at)
        return _entries(merged)

    def forget(self) -> None:
        """Grants have changed hands: drop everything."""
        self._overlays.clear()


_Overlay = dict[bytes, dict[Identity, tuple[int, int, bytes | None, int]]]


def _remember(by_key: _Overlay, bundle: int, delta: Delta) -> None:
    for entries in delta:
        if entries.kind is not Kind.STATE:
            continue
        for key, hashed, subkey, value, fire_at in zip(
            entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats, strict=True
        ):
            by_key.setdefault(key, {})["state", entries.namespace, key, subkey] = (bundle, hashed, value, fire_at)


def _forget(by_key: _Overlay, folded: int) -> _Overlay:
    """Without what is in rows by now."""
    kept: _Overlay = {}
    for key, entries in by_key.items():
        unfolded = {identity: entry for identity, entry in entries.items() if entry[0] > folded}
        if unfolded:
            kept[key] = unfolded
    return kept


async def load_dedupe_runs(connection: Connection, grant: Grant) -> list[DedupeRun]:
    """Runs within the horizon, oldest first."""
    rows = await all_rows(connection, statement("load_dedupe_runs"), {"interval": grant.interval_id})
    return [
        DedupeRun(ids, times, Instant(expires_at), Instant(clock), whole)
        for ids, times, expires_at, clock, whole in rows
    ]

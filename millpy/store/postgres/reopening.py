"""Reading a source partition on that has ended: its end, and those behind it, are set back in one transaction.

The locks of all headers make commits in flight wait or come first. Workers that own the intervals lose them (their next
commit is refused) and claim them again, with what is stored then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from millpy.errors import StaleSequencerError
from millpy.model.checkpoint import Grant, Kind
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.store.postgres.arrays import Bigints, Jsonbs, Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.deployment.live_changes import lock_headers
from millpy.store.postgres.statements import statement
from millpy.store.protocol import ClosedEnds, Event
from millpy.store.reopening import IntervalBehind, reopened


async def reopen_source(
    connection: Connection, graph_id: int, grant: Grant, watermark: Instant, closed_ends: ClosedEnds, told: Event
) -> Instant | None:
    """Set the end of a source partition back; see `Store.reopen_source`. `connection` is in a transaction."""
    await lock_headers(connection, graph_id)
    of: dict[str, Any] = {"interval_id": grant.interval_id, "sequencer": grant.sequencer}
    ((current, ended),) = await all_rows(connection, statement("read_ended_partition"), of) or [(False, False)]
    if not current:
        raise StaleSequencerError(f"interval {grant.interval_id} has another owner", stale=[grant.interval_id])
    if not ended:
        return None
    behind = [IntervalBehind(*row) for row in await all_rows(connection, statement("read_behind_end"), of)]
    found = reopened(watermark, behind)
    if found is None:
        return None
    ids = {"intervals": Bigints([grant.interval_id, *(one.interval_id for one in found.intervals)])}
    if (await all_rows(connection, statement("count_unprocessed_ends"), ids))[0][0]:
        return None
    asked = {"graph_id": graph_id, "kind": Kind.POSITION}
    newest = {name: Instant(at) for name, at in await all_rows(connection, statement("read_newest_event_times"), asked)}
    ends = closed_ends(newest)
    floors = [INSTANT_MIN, *(ends.get(one.computation, INSTANT_MIN) for one in found.intervals)]
    back = {**ids, "watermark": found.watermark}
    await connection.execute(statement("set_back_cursors"), back)
    await connection.execute(statement("disown_consumers"), ids)
    await connection.execute(statement("set_back_intervals"), {**back, "closed_ends": Bigints(floors)})
    await connection.execute(statement("forget_runs"), ids)
    for computation in sorted({one.computation for one in found.intervals} & ends.keys()):
        mark = {"graph_id": graph_id, "computation": computation, "closed_end": min(ends[computation], INSTANT_MAX)}
        await connection.execute(statement("mark_closed_end"), mark)
    event = replace(told, detail={**told.detail, **found.described(ends)})
    details = Jsonbs([msgspec.json.encode(event.detail)])
    events: dict[str, Any] = {"graph_id": graph_id, "kinds": Texts([event.kind]), "details": details}
    await connection.execute(statement("append_events"), events)
    return found.watermark

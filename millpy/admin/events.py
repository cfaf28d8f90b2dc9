"""List events, each as a sentence: those that workers recorded, dead letters, late records and parked keys."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millpy.admin.queries import Admin, Row

COUNTED_MAX = 10_000
"""How many of the newest dead letters, and late records, are counted; the oldest event then says "or more"."""
EVENTS = """
WITH noted AS (
    SELECT graph, at, kind, detail FROM millpy.events
     WHERE (CAST(:graph AS text) IS NULL OR graph = :graph) AND at >= CAST(:start AS timestamptz)
     ORDER BY at DESC LIMIT :rows_max
), letters AS (
    SELECT *, min(dead_lettered_at) OVER () AS first_at
      FROM (SELECT graph, computation, reason, detail, dead_lettered_at, count(*) OVER () AS counted
              FROM (SELECT * FROM millpy.dead_letters ORDER BY dead_letter_id DESC LIMIT :counted_max) AS n) AS newest
     WHERE (CAST(:graph AS text) IS NULL OR graph = :graph) AND dead_lettered_at >= CAST(:start AS timestamptz)
), late AS (
    SELECT *, min(recorded_at) OVER () AS first_at
      FROM (SELECT graph, computation, recorded_at, count(*) OVER () AS counted
              FROM (SELECT * FROM millpy.late_records ORDER BY late_record_id DESC LIMIT :counted_max) AS n) AS newest
     WHERE (CAST(:graph AS text) IS NULL OR graph = :graph) AND recorded_at >= CAST(:start AS timestamptz)
), happened AS (
    SELECT * FROM noted
     UNION ALL
    SELECT graph, max(dead_lettered_at), 'dead_lettered',
           jsonb_build_object('computation', computation, 'reason', reason, 'records', count(*), 'detail', min(detail),
                              'or_more', max(counted) = :counted_max AND min(dead_lettered_at) = min(first_at))
      FROM letters GROUP BY graph, computation, reason, date_trunc('minute', dead_lettered_at)
     UNION ALL
    SELECT graph, max(recorded_at), 'late',
           jsonb_build_object('computation', computation, 'records', count(*),
                              'or_more', max(counted) = :counted_max AND min(recorded_at) = min(first_at))
      FROM late GROUP BY graph, computation, date_trunc('minute', recorded_at)
     UNION ALL
    SELECT graph, parked_at, 'parked', jsonb_build_object('computation', computation, 'key', key, 'detail', detail)
      FROM millpy.parked
     WHERE (CAST(:graph AS text) IS NULL OR graph = :graph) AND parked_at >= CAST(:start AS timestamptz)
)
SELECT * FROM happened
 WHERE cardinality(CAST(:kinds AS text[])) = 0 OR kind = ANY (CAST(:kinds AS text[]))
 ORDER BY at DESC, graph, kind LIMIT :rows_max
"""
PLACES = "SELECT interval_id, computation FROM millpy.watermarks"


def list_events(admin: Admin, graph: str | None, *, start: str, kinds: Sequence[str], limit: int) -> list[Row]:
    """Return the newest `limit` events since `start`, oldest first.

    Each row has graph, at, kind, happened (a sentence) and detail (as recorded).
    """
    # The statement limits the recorded events before it filters by kind, so kinds need a higher limit.
    found = admin.ask(
        EVENTS,
        graph=graph,
        start=start or "-infinity",
        kinds=list(kinds),
        rows_max=limit if not kinds else max(limit, COUNTED_MAX),
        counted_max=COUNTED_MAX,
    )
    computations = {row["interval_id"]: row["computation"] for row in admin.ask(PLACES)}
    return [
        {
            "graph": row["graph"],
            "at": row["at"],
            "kind": row["kind"],
            "happened": describe(row["kind"], row["detail"], computations),
            "detail": row["detail"],
        }
        for row in reversed(found[:limit])
    ]


def describe(kind: str, detail: Mapping[str, Any], computations: Mapping[int, str]) -> str:
    """Describe an event in a sentence. For an unknown kind, list its details."""

    def named(ids: Sequence[int]) -> str:
        return ", ".join(sorted({computations.get(number, f"interval {number}") for number in ids}))

    match kind:
        case "claimed":
            taken = _counted(len(detail["intervals"]), "interval")
            return f"worker {detail['worker'][:8]} took {taken} of {named(detail['intervals'])}"
        case "fence_refused":
            return f"a worker that had lost {named(detail['stale'])} was kept from committing"
        case "lease_expired":
            return f"worker {detail['worker'][:8]}: {detail['why']}"
        case "refused":
            refused = f"{_counted(detail['records'], 'record')} and {_counted(detail['rows'], 'row')}"
            return f"the database refused {refused}: {detail['reason']}"
        case "paused":
            return f"source {detail['stream']} ({detail['partition']}) paused: {detail['reason']}"
        case "resumed":
            partitions = _counted(detail["partitions"], "partition")
            return f"{detail['by']} resumed source {detail['stream']} ({partitions})"
        case "dead_lettered":
            whose = detail["computation"]
            return f"{_records(detail)} of {whose} dead-lettered ({detail['reason']}): {detail['detail']}"
        case "late":
            return f"{_records(detail)} came too late for {detail['computation']}"
        case "parked":
            return f"key {detail['key']} of {detail['computation']} parked: {detail['detail']}"
        case _:
            return _describe_other(kind, detail)


def _describe_other(kind: str, detail: Mapping[str, Any]) -> str:
    if kind == "audit_differs":
        differ = f"{_counted(detail['differences'], 'row')} of {detail['table']}"
        return f"audit: {differ} in {_counted(detail['hours'], 'hour')} from {detail['first_hour']} on"
    if kind == "requested":
        into = " into their windows" if detail.get("into_window") else ""
        why = f": {detail['why']}" if detail["why"] else ""
        return f"{detail['by']} requested: {detail['action']}{into} {detail['count']} {detail['of']}{why}"
    if kind == "drain_requested":
        why = f": {detail['why']}" if detail["why"] else ""
        return f"{detail['by']} requested that worker {detail['worker'][:8]} drains{why}"
    if kind == "repaired":
        done = ", ".join(f"{detail[what]} {what}" for what in ("replaced", "added", "deleted"))
        return f"{detail['by']} repaired {detail['table']}: {done}"
    if kind == "corrected":
        return _describe_correction(detail)
    if kind in ("deployed", "switched", "rows_expired", "read_on"):
        return _describe_change(kind, detail)
    if kind in ("source_disconnected", "source_still_disconnected", "source_connected"):
        return _describe_connection(kind, detail)
    if kind == "database_restored":
        return f"the database did not answer worker {detail['worker'][:8]} from {_times(detail)}: {detail['why']}"
    if kind in ("devices_silent", "devices_back"):
        return _describe_devices(kind, detail)
    if kind in ("dead_letters_not_kept", "late_records_not_kept"):
        what = _counted(detail["count"], kind.removesuffix("s_not_kept").replace("_", " "))
        return f"{what} only counted, because enough of them are kept: {', '.join(detail['names'])}"
    if "what" in detail:
        return f"source {detail.get('stream', '')} ({detail.get('partition', '')}): {detail['what']}"
    return ", ".join(f"{name} {value}" for name, value in detail.items())


def _describe_change(kind: str, detail: Mapping[str, Any]) -> str:
    if kind == "deployed":
        reached = ", ".join(f"{name} {at}" for name, at in detail["watermarks"].items())
        since = f"; from watermark {reached}" if reached else ""
        return f"version {detail['version']}: {'; '.join(detail['changes'])}{since}"
    if kind == "switched":
        return f"{detail['by']} made generation {detail['to']} the current one; before it was {detail['from']}"
    if kind == "rows_expired":
        dropped = f"{_counted(detail['partitions'], 'partition')} with {_counted(detail['rows'], 'row')}"
        return f"{detail['table']}: dropped {dropped}, from {detail['from']} to {detail['to']}"
    closed = ", ".join(f"{name} to {end}" for name, end in detail["windows_are_closed_to"].items())
    source = f"source {detail['stream']} ({detail['partition']})"
    return f"{source} is read on: {detail['what']}" + (closed and f"; windows are closed: {closed}")


def _describe_correction(detail: Mapping[str, Any]) -> str:
    window = f"{detail['table']}, key {json.dumps(detail['key'])}, window {detail['window_start']}"
    old, new = detail["old"], detail["new"]
    if not old or not new:
        done = "added" if new else "deleted" if old else "left as it was"
    else:
        done = ", ".join(f"{name} {json.dumps(old.get(name))} -> {json.dumps(new[name])}" for name in new)
    return f"{detail['by']} corrected {window}: {done} ({detail.get('why') or 'no reason given'})"


def _describe_connection(kind: str, detail: Mapping[str, Any]) -> str:
    source = f"source {detail['stream']} ({detail['partition']})"
    failed = f", {_counted(detail['attempts'], 'failed attempt')}" if detail["attempts"] else ""
    if kind == "source_connected":
        return f"{source} is connected again; it was not from {_times(detail)}{failed}: {detail['why']}"
    still = "still " if kind == "source_still_disconnected" else ""
    return f"{source} is {still}disconnected since {detail['since']}{failed}: {detail['why']}"


def _describe_devices(kind: str, detail: Mapping[str, Any]) -> str:
    count, names = detail["count"], detail["names"]
    more = f" and {count - len(names)} more" if count > len(names) else ""
    state = "silent" if kind == "devices_silent" else "back"
    verb = "is" if count == 1 else "are"
    return f"{_counted(count, 'device')} of {detail['computation']} {verb} {state}: {', '.join(names)}{more}"


def _times(detail: Mapping[str, Any]) -> str:
    return f"{detail['since']} to {detail['until']} ({detail['seconds']:g} s)"


def _records(detail: Mapping[str, Any]) -> str:
    return _counted(detail["records"], "record", " or more" * detail["or_more"])


def _counted(count: int, what: str, more: str = "") -> str:
    return f"{count}{more} {what}{'s' if count != 1 else ''}"

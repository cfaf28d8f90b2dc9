"""Judge replication slots: those of sources that read tables of this database, and others that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.admin.diagnosis import Facts
from millpy.limits import Limits
from millpy.model.finding import Finding, Severity

CHECK = "replication slot"
FILLS_DISK = "the log grows until it is read, and fills the disk unless max_slot_wal_keep_size is set"
KEPT_BYTES_MAX = 1_000_000_000
"""Bytes of the log that a slot keeps, from which it is far behind."""


def judge_slots(facts: Facts, limits: Limits) -> Iterator[Finding]:
    """Yield a finding for each slot of a source, and for each other one without a reader."""
    del limits
    for row in facts.slots:
        found = f"slot {row['slot']} keeps {row['bytes'] / 1e6:,.0f} MB of the log"
        drop = f"SELECT pg_drop_replication_slot('{row['slot']}')"
        if not row["is_source"]:
            rows = "; old row versions stay, too, so commits get slower" if row["keeps_rows"] else ""
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{found}, and nobody reads it",
                f"{FILLS_DISK}{rows}",
                f"start what reads it (a standby, a backup, another program); if it is not needed any more: {drop}",
            )
            continue
        if row["graph"] is None:
            yield Finding(
                Severity.WARNING, CHECK, f"{found}, and its source is gone", "the disk fills with the log", drop
            )
            continue
        found = f"{row['graph']}.{row['source']}: {found}"
        if row["wal_status"] in ("lost", "unreserved"):
            yield Finding(
                Severity.ERROR,
                CHECK,
                f"{row['graph']}.{row['source']}: slot {row['slot']} has lost a part of the log, or is about to",
                "changes of the table are missing (max_slot_wal_keep_size, idle_replication_slot_timeout)",
                "start a worker at once; if it says that the slot is lost, it says what to do",
            )
        elif not row["active"] or row["bytes"] > KEPT_BYTES_MAX:
            why = "and nobody reads it" if not row["active"] else "because its reader is behind"
            yield Finding(
                Severity.WARNING,
                CHECK,
                f"{found}, {why}",
                FILLS_DISK,
                "start a worker of the graph, or drop the graph",
            )
        else:
            yield Finding(Severity.OK, CHECK, found)

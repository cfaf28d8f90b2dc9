"""Counts the commits, bundle sizes and deltas of a finished run in the tables."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import psycopg

_ARRIVED = ("injected", "consumed", "late", "dead_lettered")


def committed_bundles(url: str) -> dict[str, Any]:
    """Count commits and records per bundle from `mill.deltas`, whose counters are absolute (I8).

    Only for runs whose deltas are all still in the ring. A turn is one transaction: its deltas share an xmin.
    """
    with psycopg.connect(url, autocommit=True) as connection:
        rows = connection.execute(
            "SELECT interval_id, bundle, xmin::text, bytes, document FROM mill.deltas ORDER BY interval_id, bundle"
        ).fetchall()
    counted: dict[tuple[int, str, str], int] = defaultdict(int)
    largest: dict[str, int] = {"injector": 0, "stage": 0}
    commits: set[str] = set()
    for interval_id, _bundle, transaction, _bytes, document in rows:
        arrived = {"injector": 0, "stage": 0}
        for entries in document if isinstance(document, list) else json.loads(document):
            if entries["kind"] != "counter" or entries["namespace"] not in _ARRIVED:
                continue
            for subkey, value in zip(entries["subkey"], entries["value"], strict=True):
                if (entries["namespace"] == "injected") == subkey.isdecimal():
                    continue  # of a source (its subkey is a stream) only what it injected, of a stage the rest
                name = (interval_id, entries["namespace"], subkey)
                arrived["injector" if entries["namespace"] == "injected" else "stage"] += value[0] - counted[name]
                counted[name] = value[0]
        if any(arrived.values()):
            commits.add(transaction)
        for kind, records in arrived.items():
            largest[kind] = max(largest[kind], records)
    return {
        "commits_with_records": len(commits),
        "largest_source_bundle": largest["injector"],
        "largest_stage_bundle": largest["stage"],
        "deltas": len(rows),
        "delta_bytes": sum(row[3] for row in rows),
    }

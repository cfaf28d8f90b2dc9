"""What late records cost PostgreSQL alone: the reads and writes of LATE by psycopg, without a stream processor.

Two connections work at the same time, as those of a worker do. One reads the stored windows of a batch, then commits
their rows of the result table and a log of their changes; the other one updates the stored windows of the batches that
are committed. Parameters are encoded before the clock starts, and nothing is computed from what is read.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import psycopg

from millpy.store.postgres.arrays import Bigints, PgArray, Texts, Timestamps, register_arrays

BATCH = 32_768
LOG_BYTES = 150
"""Bytes of a change in the log: a key, a window, a value."""
PLAN = b"SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off"
FIND_INTERVALS = b"""
SELECT key, interval_id FROM mill.keyed WHERE kind = 'window' AND subkey = %(subkey)s
"""
# The rows to read or write are found with one index probe for each: a plan that does not depend on statistics.
_KEYED = """
    FROM unnest(%(intervals)s, %(keys)s, %(subkeys)s, %(values)s) AS e (interval, key, subkey, value)
   CROSS JOIN LATERAL (
         SELECT o.ctid, o.value AS old FROM mill.keyed AS o
          WHERE o.interval_id = e.interval AND o.kind = 'window' AND o.namespace = ''
            AND hashtextextended(o.key, 0) = hashtextextended(e.key COLLATE "C", 0) AND o.key = e.key
            AND hashtextextended(o.subkey, 0) = hashtextextended(e.subkey COLLATE "C", 0) AND o.subkey = e.subkey
         OFFSET 0) AS found
"""
READ = f"SELECT string_agg(found.old, ',') {_KEYED}".encode()
FOLD = f"""
UPDATE mill.keyed AS k SET value = f.value, bundle = k.bundle + 1
  FROM (SELECT found.ctid AS place, e.value {_KEYED} OFFSET 0) AS f
 WHERE k.ctid = f.place
""".encode()
RESULTS = b"""
UPDATE late.by_minute AS r
   SET n = f.n, total = f.total, pane_index = r.pane_index + 1, bundle = r.bundle + 1, emitted_at = now()
  FROM (SELECT found.ctid AS place, e.n, e.total
          FROM unnest(%(devices)s, %(starts)s, %(ends)s, %(ns)s, %(totals)s) AS e (device, starts, ends, n, total)
         CROSS JOIN LATERAL (
               SELECT o.ctid FROM late.by_minute AS o
                WHERE o.device = e.device AND o.window_start = e.starts AND o.window_end = e.ends
               OFFSET 0) AS found
        OFFSET 0) AS f
 WHERE r.ctid = f.place
"""
Batch = dict[str, PgArray]


def batches(devices: np.ndarray, starts_us: np.ndarray, length_us: int, intervals: dict[str, int]) -> list[Batch]:
    """Encode the parameters of all statements; each window may occur once in a batch."""
    found = []
    for lo in range(0, len(devices), BATCH):
        windows = np.unique(np.stack([devices[lo : lo + BATCH], starts_us[lo : lo + BATCH]]), axis=1)
        names = [f"dev-{device:06d}" for device in windows[0].tolist()]
        keys = [f'"{name}"' for name in names]
        starts, count = windows[1], len(names)
        subkeys = [f"{start}/{start + length_us}" for start in starts.tolist()]
        values = ['{"values":[2,1234],"pane_index":2,"late_count":1,"emitted":true,"bundle":1234}'] * count
        found.append(
            {
                "intervals": Bigints([intervals[key] for key in keys]),
                "keys": Texts(keys),
                "subkeys": Texts(subkeys),
                "values": Texts(values),
                "devices": Texts(names),
                "starts": Timestamps(starts),
                "ends": Timestamps(starts + length_us),
                "ns": Bigints(np.full(count, 2, np.int64)),
                "totals": Bigints(np.full(count, 1_234, np.int64)),
                "log": Texts(["x" * (LOG_BYTES * count)]),
            }
        )
    return found


def records_per_s(url: str, devices: np.ndarray, starts_us: np.ndarray, length_us: int) -> float:
    """Return the records a second, until the last stored window is updated; changes the tables that LATE leaves."""
    with _connection(url) as commits, _connection(url) as folds:
        subkey = f"{starts_us[0]}/{starts_us[0] + length_us}"
        intervals = dict(commits.execute(FIND_INTERVALS, {"subkey": subkey}).fetchall())
        parts = batches(devices, starts_us, length_us, intervals)
        commits.execute(b"CREATE TABLE late.bare_log (document text)")
        commits.execute(b"ALTER TABLE late.bare_log ALTER document SET STORAGE EXTERNAL")
        folds.execute(b"SET synchronous_commit = off")
        committed: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        failed: list[BaseException] = []

        def fold() -> None:
            try:
                while (part := committed.get()) is not None:
                    assert folds.execute(FOLD, part).rowcount > 0
            except BaseException as error:
                failed.append(error)

        folding = threading.Thread(target=fold)
        started = time.monotonic()
        folding.start()
        for part in parts:
            commits.execute(READ, part).fetchone()
            with commits.transaction():
                assert commits.execute(RESULTS, part).rowcount > 0
                commits.execute(b"INSERT INTO late.bare_log SELECT unnest(%(log)s)", part)
            committed.put(part)
        committed.put(None)
        folding.join()
        taken_s = time.monotonic() - started
    if failed:
        raise failed[0]
    return len(devices) / taken_s


def _connection(url: str) -> psycopg.Connection[Any]:
    connection = psycopg.connect(url, autocommit=True)
    register_arrays(connection)  # type: ignore[arg-type]
    connection.execute(PLAN)
    return connection

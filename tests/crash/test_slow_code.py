"""A backlog behind slow code, and a worker that is killed halfway: progress continues and calls end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import psycopg
import pytest

from tests.crash.harness import Worker, await_true

GRAPH = Path(__file__).with_name("slow_graph.py")
WATCHDOG_S = 1.2
DEVICES = 3


def seen(url: str) -> list[int]:
    with psycopg.connect(url, autocommit=True) as connection:
        exists = connection.execute("SELECT to_regclass('slow.seen')").fetchone()
        if exists is None or exists[0] is None:
            return []
        return [row[0] for row in connection.execute("SELECT value FROM slow.seen").fetchall()]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("kind", ["callback", "filter", "async"])
@pytest.mark.parametrize(
    ("call_s", "records"),
    [(0.002, 1_200), (0.5 * WATCHDOG_S, 8), (1.5 * WATCHDOG_S, 3)],
    ids=["many quick ones", "half the watchdog", "longer than the watchdog"],
)
def test_a_backlog_behind_slow_code_is_processed_across_a_kill(
    tmp_path: Path, database_url: str, kind: str, call_s: float, records: int
) -> None:
    source, calls = tmp_path / "in.ndjson", tmp_path / "calls"
    source.write_text("".join(f'{{"device":"d{n % DEVICES}","at":{1_000 * n},"value":{n}}}\n' for n in range(records)))
    environment = {"SLOW_CALL_S": str(call_s), "SLOW_CALLS": str(calls), "SLOW_KIND": kind}
    settings = {"bundle_records_max": 65_536, "watchdog_s": WATCHDOG_S, "step_s_max": 1.0}
    with Worker(tmp_path, database_url, source, graph=GRAPH, environment=environment, **settings) as killed:
        killed.await_while_running(lambda: calls.exists() and calls.stat().st_size > 0, "called")
        if call_s < 0.1:
            killed.await_while_running(lambda: 0 < len(seen(database_url)) < records, "some are committed")
        killed.kill()
    with Worker(tmp_path, database_url, source, graph=GRAPH, environment=environment, **settings) as other:
        await_true(lambda: len(seen(database_url)) == records, "all are committed", 60)
        other.await_finished()

    assert sorted(seen(database_url)) == list(range(records))
    times = Counter(calls.read_text().split())
    assert max(times.values()) <= 2, "once more, for the kill"

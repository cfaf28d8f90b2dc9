"""A worker of `millpy run --workers N` as a process."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psycopg

from millpy.embedded import EmbeddedPostgres
from millpy.process.launcher import worker_command
from millpy.store.postgres.deployment.migrate import migrate
from tests.waiting import WITHIN_S, await_true

GRAPH = """
import msgspec
from millpy import Count, EventTime, File, FixedWindows, Graph, minutes

class Reading(msgspec.Struct):
    device: str
    at: int

graph = Graph("hall")
at = EventTime("at", unit="s", sorted=True)
readings = graph.inject("readings", File("readings.ndjson"), schema=Reading, event_time=at)
readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("counts")
"""


def test_worker_that_starts_during_an_outage_of_the_database_waits_for_its_end(tmp_path: Path) -> None:
    (tmp_path / "hall.py").write_text(GRAPH)
    (tmp_path / "readings.ndjson").write_text('{"device": "a", "at": 60}\n' * 3)
    server = EmbeddedPostgres(tmp_path / "postgres")
    server.start()
    url, log = server.url(), tmp_path / "log"
    migrate(url, "millpy")
    server.kill()
    with log.open("wb") as out:
        worker = subprocess.Popen(
            worker_command(str(tmp_path / "hall.py")), stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=tmp_path,
            env={**os.environ, "MILLPY_DATABASE_URL": url, "MILLPY_RETRY_S_MAX": "0.3"},
        )  # fmt: skip
    try:
        await_true(lambda: log.read_text().count("trying again") > 2 or worker.poll(), "it tries several times")
        assert worker.poll() is None, log.read_text()
        server.restart()
        assert worker.wait(WITHIN_S) == 0, log.read_text()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT n FROM hall.counts").fetchall() == [(3,)]
    finally:
        worker.kill()
        worker.communicate()
        server.release()

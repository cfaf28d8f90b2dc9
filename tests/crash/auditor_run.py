"""An auditor that is killed at each step of its loop: is every hour audited, and every difference one event?

    python -m tests.crash.auditor_run        (make crash-auditor)

A worker and an archiver compute days of windows; one row of each day is falsified. Then `services.auditor` runs as a
process, and is killed with SIGKILL: before it has chosen the hours, while its audit starts Spark, when the audit is
about to record the hours, and as soon as they are recorded; each time once alone and once with all that it has
started. The last one audits the rest. What an auditor that was killed alone has started must end by itself. After a
repair and another audit, the finding of `millpy doctor` must be gone. The last line is JSON: kills, hours, missing
(hours that were not audited), falsified, found (by the hours that are remembered), events, orphans, findings_left. Exit
status 0 only when nothing is missing, too much or left, and every falsified row was found and is one event.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg

from millpy.model.time import Instant, to_datetime
from tests.crash.harness import ROOT, await_true
from tests.databases import fresh_database, passing_server

GRAPH = Path(__file__).with_name("spark_graph.py")
HOUR_US = 3_600_000_000
START_US = 1_790_000_000_000_000 // HOUR_US * HOUR_US
DAYS = 5
RECORDS_AN_HOUR = 20
STEP_S_MAX = 120.0
END_S_MAX = 30.0
FALSIFY = "UPDATE crashed.sums SET total = total + %s WHERE window_start = to_timestamp(%s) RETURNING device"
BLOCKED = """
SELECT count(*) FROM pg_locks WHERE relation = 'mill.audits'::regclass AND NOT granted AND database = (
       SELECT oid FROM pg_database WHERE datname = current_database())
"""


class KilledAuditor:
    """Starts auditors, and kills each at a step.

    Args:
        url: the database.
        directory: a directory with the archive, for logs.
    """

    def __init__(self, url: str, directory: Path) -> None:
        self._url = url
        self._directory = directory
        self.connection = psycopg.connect(url, autocommit=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.kills = self.orphans = 0

    def start(self) -> int:
        """Start an auditor; return its process's number, which is that of its session, too."""
        environment = {
            **os.environ,
            "MILLPY_DATABASE_URL": self._url,
            "MILLPY_ARCHIVE": str(self._directory / "archive"),
        }
        environment |= {"MILLPY_HTTP": "127.0.0.1:0", "PYTHONPATH": str(ROOT), "JAVA_TOOL_OPTIONS": "-XX:+UseSerialGC"}
        command = [sys.executable, "-m", "services.auditor", str(GRAPH), "--master", "local[1]", "--memory", "1g"]
        with (self._directory / "auditor.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        return self.process.pid

    def kill(self, *, alone: bool) -> None:
        """Kill the auditor, and wait for the end of what it has started."""
        assert self.process is not None
        (os.kill if alone else os.killpg)(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.kills += 1
        try:
            await_true(lambda: not _of_session(self.process.pid), "all have ended", END_S_MAX)  # type: ignore[union-attr]
        except AssertionError:
            self.orphans += 1
            for pid in _of_session(self.process.pid):
                os.kill(pid, signal.SIGKILL)

    def at_start(self, *, alone: bool) -> None:
        """Kill it before it has chosen the hours."""
        pid = self.start()
        await_true(lambda: b"services.auditor" in Path(f"/proc/{pid}/cmdline").read_bytes(), "started", STEP_S_MAX)
        self.kill(alone=alone)

    def as_spark_starts(self, *, alone: bool) -> None:
        """Kill it while its audit starts Spark."""
        pid = self.start()
        await_true(lambda: any("java" in command for command in _of_session(pid).values()), "Spark starts", STEP_S_MAX)
        self.kill(alone=alone)

    def before_it_records(self, *, alone: bool) -> None:
        """Kill it when its audit waits for the table of audited hours."""
        with self.connection.transaction():
            self.connection.execute("LOCK TABLE mill.audits IN EXCLUSIVE MODE")
            self.start()
            await_true(lambda: self._ask(BLOCKED) > 0, "blocked", STEP_S_MAX)
            self.kill(alone=alone)
        await_true(lambda: self._ask(BLOCKED) == 0, "the statement has ended", END_S_MAX)

    def as_soon_as_it_has_recorded(self, *, alone: bool) -> None:
        """Kill it before it knows that its audit has recorded the hours."""
        before = self._ask("SELECT count(*) FROM mill.audits")
        self.start()
        await_true(lambda: self._ask("SELECT count(*) FROM mill.audits") > before, "recorded", STEP_S_MAX)
        self.kill(alone=alone)

    def finish(self, hours: int) -> None:
        """Let an auditor audit the rest, and end it."""
        self.start()
        last = f"SELECT count(*) FROM mill.audits WHERE hour = {START_US + (hours - 1) * HOUR_US}"
        await_true(lambda: self._ask(last) == 1, "all is audited", 3 * STEP_S_MAX)
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(END_S_MAX) == 0, (self._directory / "auditor.log").read_text()

    def _ask(self, query: str) -> int:
        (found,) = self.connection.execute(query).fetchone() or (0,)  # type: ignore[call-overload]
        return int(found)


def _of_session(session: int) -> dict[int, str]:
    """Return the processes of a session, with their commands."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,stat=,args=", "-s", str(session)], capture_output=True, text=True, check=False
    ).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return {int(pid): command for pid, status, command in rows if not status.startswith("Z")}


def compute(url: str, directory: Path) -> None:
    """Let a worker and an archiver read days of records, and a last one that closes all windows."""
    inputs = directory / "input"
    inputs.mkdir()
    every_us = HOUR_US // RECORDS_AN_HOUR
    count = DAYS * 24 * RECORDS_AN_HOUR
    records = [{"device": f"d{n % 3}", "at": START_US + n * every_us, "n": n} for n in range(count)]
    records.append({"device": "end", "at": START_US + DAYS * 24 * HOUR_US + 60_000_000, "n": count})
    (inputs / "ready.tmp").write_text("".join(json.dumps(record) + "\n" for record in records))
    (inputs / "ready.tmp").rename(inputs / "0.ndjson")
    os.environ["SPARK_INPUT"] = str(inputs)
    millpy = [sys.executable, "-m", "millpy"]
    commands = [
        [*millpy, "run", str(GRAPH), "--database", url],
        [*millpy, "archive", str(GRAPH), "--to", str(directory / "archive"), "--every", "0.2", "--database", url],
    ]
    with (directory / "workers.log").open("wb") as log:
        running = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
        try:
            await_true(lambda: _is_archived(url, count), "all is computed and archived", STEP_S_MAX)
        finally:
            for process in running:
                process.terminate()
                process.wait(END_S_MAX)


def _is_archived(url: str, windows: int) -> bool:
    try:
        with psycopg.connect(url, autocommit=True) as connection:
            (stored,) = connection.execute("SELECT count(*) FROM crashed.sums WHERE device <> 'end'").fetchone() or (0,)
            (late,) = connection.execute(
                "SELECT count(*) FROM millpy.watermarks WHERE low_watermark < to_timestamp(%s)",
                [START_US / 1e6 + DAYS * 86_400],
            ).fetchone() or (1,)
            return bool(stored == windows and not late)
    except psycopg.errors.UndefinedTable:
        return False


def millpy(*arguments: str) -> Any:
    """Run a command; return the document that it prints."""
    command = [sys.executable, "-m", "millpy", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def findings(url: str) -> int:
    """Count what the doctor finds in audits."""
    return sum(one["check"] == "audit" for one in millpy("doctor", "--database", url))


def killed_and_judged(url: str, directory: Path) -> dict[str, int]:
    """Falsify, kill, repair; return the counts of the last line."""
    compute(url, directory)
    auditor = KilledAuditor(url, directory)
    falsified_s = [START_US / 1e6 + day * 86_400 + 7 * 3_600 for day in range(DAYS)]
    for at in falsified_s:
        assert len(auditor.connection.execute(FALSIFY, [1, at]).fetchall()) == 1
    steps: list[Callable[..., None]] = [
        auditor.at_start,
        auditor.as_spark_starts,
        auditor.before_it_records,
        auditor.as_soon_as_it_has_recorded,
    ]
    for step in steps:
        for alone in (True, False):
            step(alone=alone)
            print(f"killed {'alone' if alone else 'with all that it has started'}: {step.__name__}", flush=True)
    hours = DAYS * 24
    auditor.finish(hours)
    remembered = dict(auditor.connection.execute("SELECT hour, differences FROM mill.audits").fetchall())
    found = {(hour // HOUR_US * 3_600.0): wrong for hour, wrong in remembered.items() if wrong}
    left = 0 if findings(url) == 1 else 1
    for at in falsified_s:
        auditor.connection.execute(FALSIFY, [-1, at])
    span = ["--from", _iso(START_US), "--to", _iso(START_US + hours * HOUR_US)]
    kept = ["--engine", "native", "--archive", str(directory / "archive")]
    assert millpy("audit", str(GRAPH), "--database", url, "--master", "local[1]", *kept, *span)["differences"] == 0
    events = auditor.connection.execute(
        "SELECT (detail->'differences')::int FROM mill.events WHERE kind = 'audit_differs'"
    ).fetchall()
    return {
        "kills": auditor.kills,
        "hours": len(remembered),
        "missing": len({START_US + hour * HOUR_US for hour in range(hours)} - remembered.keys()),
        "falsified": len(falsified_s),
        "found": sum(found.get(at, 0) for at in falsified_s) if found.keys() == {*falsified_s} else -1,
        "events": sum(count for (count,) in events),
        "orphans": auditor.orphans,
        "findings_left": left + findings(url),
    }


def _iso(at_us: int) -> str:
    return to_datetime(Instant(at_us)).isoformat()


def main() -> int:
    """Run it; return the exit status."""
    with tempfile.TemporaryDirectory(prefix="millpy-crash-auditor-") as place:
        directory = Path(place)
        with passing_server(directory / "postgres") as server, fresh_database(server) as name:
            try:
                totals = killed_and_judged(server.url(name), directory)
            except AssertionError:
                log = directory / "auditor.log"
                print(log.read_text()[-5_000:] if log.exists() else "", file=sys.stderr)
                raise
    print(json.dumps(totals))
    wrong = totals["missing"] or totals["hours"] != DAYS * 24 or totals["orphans"] or totals["findings_left"]
    return int(bool(wrong) or not totals["falsified"] == totals["found"] == totals["events"])


if __name__ == "__main__":
    sys.exit(main())

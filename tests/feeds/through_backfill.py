"""Half of each feed through `millpy backfill`, the rest through workers: against the tables computed without us.

    python -m tests.feeds.through_backfill [FEED ...]        (make feeds-backfill)

The backfill is killed while it computes and while it hands over, and so are workers behind it. The last line is JSON:
tables, rows, differences, kills. Exit status 0 only when there are no differences.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from millpy.embedded import EmbeddedPostgres
from tests.crash.harness import Worker, await_true
from tests.feeds.feed import DATA, DAY_S, FEEDS, THE_END, Feed
from tests.feeds.through_mqtt import GENTLE, SETTLE_S_MAX, TRAPS, all_over
from tests.feeds.through_spark import Checked

RUN_S_MAX = 600


def written(feed: Feed, directory: Path) -> list[dict[str, str]]:
    """Make a directory for each source; return, for each part of the feed, the directories' files that are due."""
    (directory / "files").mkdir()
    feed.write_files(directory / "files")
    parts: list[dict[str, str]] = [{}, {}, {}]
    for path in (directory / "files").iterdir():
        opened = gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")
        with opened as lines:
            header, *rows = list(csv.reader(lines))
        stem = path.name.partition(".")[0]
        (directory / stem).mkdir()
        half = len(rows) // 2
        end = [_end(feed, column) for column in header]
        for part, own in zip(parts, (rows[:half], rows[half:], [end]), strict=True):
            part[stem] = "".join(",".join(row) + "\r\n" for row in [header, *own])
    return parts


def _end(feed: Feed, column: str) -> str:
    """A field of the record that closes all windows."""
    if column in ("event_ms", "event_s", "arrival_ms"):
        return str(feed.ends_at + DAY_S * feed.per_s)
    return THE_END if column in ("device", "room", "sensor", "session", "network") else "0"


def bring(part: dict[str, str], number: int, directory: Path) -> None:
    """Let the sources find a part."""
    for stem, text in part.items():
        ready = directory / stem / f".{number}"
        ready.write_text(text)
        ready.rename(directory / stem / f"{number}.csv")


def backfilled(feed: Feed, url: str, directory: Path, chance: random.Random) -> int:
    """Run the backfill, and kill it once while it computes, and once behind that. Return how often it was killed."""
    work = directory / "work"
    command = [sys.executable, "-m", "millpy", "backfill", str(feed.graph), "--work", str(work), "--database", url]
    kills = 0
    for is_due in (lambda: _commits(work) >= 3, lambda: _is_computed(work)):
        log = (directory / "log").open("w")
        with log, subprocess.Popen(command, start_new_session=True, stdout=log, stderr=log) as driver:
            deadline = time.monotonic() + RUN_S_MAX
            while driver.poll() is None and not is_due():
                assert time.monotonic() < deadline, (directory / "log").read_text()
                time.sleep(0.02)
            time.sleep(chance.uniform(0, 1))
            if driver.poll() is None:
                os.killpg(driver.pid, signal.SIGKILL)
                kills += 1
    subprocess.run(command, check=True, timeout=RUN_S_MAX, stdout=sys.stderr)
    return kills


def _commits(work: Path) -> int:
    return len(list((work / "checkpoint/commits").glob("*.json")))


def _is_computed(work: Path) -> bool:
    newest = max((work / "checkpoint/commits").glob("*.json"), default=None)
    return newest is not None and bool(json.loads(newest.read_bytes())["finished"])


def through_backfill(feed: Feed, url: str, directory: Path, chance: random.Random) -> tuple[Checked, int]:
    """One feed. Return what its tables have, and the number of kills."""
    os.environ["FEED_DIRECTORIES"] = str(directory)
    parts = written(feed, directory)
    bring(parts[0], 1, directory)
    kills = backfilled(feed, url, directory, chance)
    for number in (2, 3):
        bring(parts[number - 1], number, directory)
    with ExitStack() as stack:
        for trap in TRAPS:
            trapped = stack.enter_context(
                Worker(directory, url, Path("none"), graph=feed.graph, failpoint=trap, **GENTLE)
            )
            await_true(lambda killed=trapped: killed.process.poll() is not None or all_over(url, feed), "trapped", 60)
            trapped.kill()
            kills += 1
        if not all_over(url, feed):  # else a new worker might be drained before it could listen
            last = stack.enter_context(Worker(directory, url, Path("none"), graph=feed.graph, **GENTLE))
            await_true(lambda: all_over(url, feed), "all is over", SETTLE_S_MAX)
            last.drain()
            last.await_finished()
    return feed.check(url), kills


def main(names: list[str]) -> int:
    """Run some feeds, or all."""
    if not DATA.exists():
        print(f"the recorded feeds are not in {DATA}", file=sys.stderr)
        return 2
    tables = rows = differences = kills = 0
    chance = random.Random(1)
    print(f"{'feed':20} {'expected':42} {'rows':>9} {'differences':>12}")
    for feed in (FEEDS[name] for name in names or FEEDS):
        with (
            tempfile.TemporaryDirectory(prefix="millpy-feeds-") as place,
            EmbeddedPostgres(Path(place) / "postgres") as server,
        ):
            subprocess.run(
                [sys.executable, "-m", "millpy", "migrate", "--database", server.url()], check=True, stdout=sys.stderr
            )
            found, killed = through_backfill(feed, server.url(), Path(place), chance)
            kills += killed
            for table, (count, wrong) in found.items():
                print(f"{feed.name:20} {table:42} {count:>9,} {wrong:>12,}", flush=True)
                tables, rows, differences = tables + 1, rows + count, differences + wrong
    print(json.dumps({"tables": tables, "rows": rows, "differences": differences, "kills": kills}))
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

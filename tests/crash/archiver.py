"""Processes that are killed at an archive: `python -m tests.crash.archiver INPUT DATABASE PLACE KILL…`.

PLACE is a directory or a URL. A KILL is `WORK.POINT:COUNT`: what is done, one of `WORKS`, where it is killed, one of
`POINTS` or `fenced`, and the number of the call at which it is. Each has a forked process, so that the imports are paid
once. Behind the kills of a work it is done to its end. Behind each of them, what is listed must be there.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import psycopg

from millpy.clock import SystemClock, random_id
from millpy.limits import Limits
from millpy.model.time import Instant
from millpy.process.archive_erasure import erase_key
from millpy.process.assembly import archives_of, run_worker
from millpy.store.archive.directory import ArchiveDirectory
from millpy.store.archive.storage import parquet_file
from millpy.store.postgres.archiving import HOUR_US, ArchiveInto, ArchivingStore
from millpy.store.protocol import WorkerInfo
from millpy.testing.crash import CrashFailpoints, parse_spec
from tests.crash.archive_graph import START_US, archived_graph

LIMITS = Limits(lease_ttl_s=0.5, bundle_records_max=20)
WORKER_LIMITS = Limits(lease_ttl_s=1.5, bundle_records_max=100, archive_bytes_min=1_500, epoch_s=3_600)
MAINTAINED_S = 20.0
"""The lease of a maintenance run, which sends no heartbeats. The next run seizes the intervals without waiting."""
KEPT_S = 1_800.0
ERASED = "d5"
ARCHIVED = ("writing", "written", "fenced", "committed", "published")
REWRITTEN = ("rewritten", "committed", "published", "deleted")
FORGOTTEN = ("deleting", "deleted")
LISTED = "SELECT path FROM millpy.archive_files WHERE archive = 'readings_archive' ORDER BY path"


def kill(*_: Any) -> None:
    """End this process as a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(self: ArchiveDirectory, grant: Any, bundle: Any, hour: Any, content: Any) -> None:
    """Write the first half of a file."""
    WRITE(self, grant, bundle, hour, content.slice(0, content.size // 2))
    kill()


def before(method: str) -> tuple[str, Callable[..., Any]]:
    """Be killed instead of a call."""
    return method, kill


def after(method: str) -> tuple[str, Callable[..., Any]]:
    """Be killed behind a call."""
    do = getattr(ArchiveDirectory, method)
    return method, lambda *given: (do(*given), kill())


WRITE = ArchiveDirectory.write
POINTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "writing": ("write", write_half),
    "written": after("write"),
    "rewritten": after("rewrite"),
    "committed": before("publish"),
    "published": after("publish"),
    "deleting": before("delete"),
    "deleted": after("delete"),
}


def trap(point: str, count: int) -> str:
    """Set the trap of a point; return the failpoint that it needs."""
    if point == "fenced":
        return f"after_fence:{count}:kill"
    method, instead = POINTS[point]
    do, calls = getattr(ArchiveDirectory, method), iter(range(1, 1_000_000))
    setattr(ArchiveDirectory, method, lambda *given: (instead if next(calls) == count else do)(*given))
    return ""


def archive(source: Path, url: str, place: str, failpoint: str = "") -> None:
    """Archive to the end."""
    graph = archived_graph(source)
    points = CrashFailpoints(parse_spec(failpoint))
    into = ArchiveInto(place, every_s=0.0)
    limits = LIMITS if "://" not in place else Limits(lease_ttl_s=1, bundle_records_max=150)  # a file has its price
    asyncio.run(run_worker(graph, url, limits=limits, only=archives_of(graph), archive=into, failpoints=points))


def run(source: Path, url: str, place: str, failpoint: str = "") -> None:
    """Run the whole graph to its end in a worker that archives: large bundles in memory, small ones from segments."""
    graph, points = archived_graph(source), CrashFailpoints(parse_spec(failpoint))
    into, limits = ArchiveInto(place, every_s=0.0, in_worker=True), WORKER_LIMITS
    asyncio.run(run_worker(graph, url, limits=limits, archive=into, failpoints=points))


def compact(source: Path, url: str, place: str, _: str = "", *, rounds: int = 1) -> None:
    """Merge all small files, as maintenance does, and look for more as often as `rounds` says."""
    asyncio.run(_maintain(source, url, ArchiveInto(place, every_s=0.0, compact_after_s=0.0), rounds=rounds))


def forget(source: Path, url: str, place: str, _: str = "", *, owns: bool = True) -> None:
    """Delete the files of the first hour, as maintenance does; every archiver may, also one that owns nothing."""
    now_us = Instant(START_US - START_US % HOUR_US + HOUR_US + int(KEPT_S * 1e6))
    asyncio.run(_maintain(source, url, ArchiveInto(place, every_s=0.0, kept_s=KEPT_S), now_us, owns=owns))


def erase(source: Path, url: str, place: str, _: str = "") -> None:
    """Erase a key from the archive of readings."""
    into = ArchiveInto(place, every_s=0.0)
    limits = Limits(lease_ttl_s=MAINTAINED_S)
    asyncio.run(erase_key(archived_graph(source), "readings_archive", ERASED, url, into, limits))


async def _maintain(
    source: Path, url: str, into: ArchiveInto, now_us: Instant | None = None, *, owns: bool = True, rounds: int = 1
) -> None:
    graph, clock = archived_graph(source), SystemClock()
    kept = dict.fromkeys(("dead_letter_kept_s", "settled_kept_s", "events_kept_s"), 1e9)
    async with ArchivingStore(url, into, clock, limits=LIMITS) as store:
        deployed = await store.deploy(graph.spec())
        worker = WorkerInfo(random_id(), deployed.graph_id, deployed.version, archives_of(graph))
        await store.register(worker, MAINTAINED_S)
        ids = [i.interval_id for name in archives_of(graph) for i in deployed.intervals_of(name) if owns]
        await store.read(await store.seize(worker.worker_id, ids), state_rows_max=1)
        for _ in range(rounds):
            while await store.forget_old(now_us=now_us or clock.now_us(), **kept):
                pass


WORKS = {"run": run, "archive": archive, "compact": compact, "forget": forget, "erase": erase}


def main(source: str, url: str, place: str, *kills: str) -> int:
    """Do the works; return the exit status."""
    if "://" in place:
        import s3fs  # noqa: F401 - once for all children
    for work, of_work in groupby(kills or ("archive",), lambda text: text.partition(".")[0]):
        do, left = WORKS[work], list[int]()
        for text in of_work:
            point, _, count = text.partition(".")[2].partition(":")
            if point and not is_killed(lambda: do(Path(source), url, place, trap(point, int(count)))):  # noqa: B023
                print(f"{text} was not reached", file=sys.stderr)
                return 1
            if work not in ("run", "archive"):
                found = listed(url, place)
                if left not in ([], found):
                    print(f"behind {text} there are {len(found)} of {len(left)} records", file=sys.stderr)
                    return 1
                left = found
        do(Path(source), url, place)
    return 0


def listed(url: str, place: str) -> list[int]:
    """Return the readings that the manifest lists, without the erased key. A file that is lost is an error."""
    with psycopg.connect(url) as connection:
        paths = [path for (path,) in connection.execute(LISTED).fetchall()]
    files = ArchiveDirectory(place, paths[0].rsplit("/", 2)[0])
    tables = [parquet_file(files.find(path)).read(["n", "device"]) for path in paths]
    return sorted(row["n"] for table in tables for row in table.to_pylist() if row["device"] != ERASED)


def is_killed(run: Callable[[], Any]) -> bool:
    """Run something in a forked process; return whether it is killed."""
    child = os.fork()
    if not child:
        run()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

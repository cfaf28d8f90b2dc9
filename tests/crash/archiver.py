"""Archivers that are killed one after another: `python -m tests.crash.archiver INPUT DATABASE DIRECTORY POINT…`.

A POINT is one of `POINTS` or `COMPACTION_POINTS` with the number of the call at which it kills, as in `written:2`. Each
has a forked process, so that the imports are paid once. The last archiver is not killed. When a point of compaction is
named, small files are merged afterwards, and that process is not killed, either.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millpy.clock import SystemClock, random_id
from millpy.limits import Limits
from millpy.process.assembly import archives_of, run_worker
from millpy.store.archive.directory import ArchiveDirectory
from millpy.store.postgres.archiving import ArchiveInto, ArchivingStore
from millpy.store.protocol import WorkerInfo
from millpy.testing.crash import CrashFailpoints, parse_spec
from tests.crash.archive_graph import archived_graph

LIMITS = Limits(lease_ttl_s=0.5, bundle_records_max=20)
POINTS = ("writing", "written", "fenced", "committed", "published")
COMPACTION_POINTS = ("rewritten", "listed", "renamed", "deleted")


def kill() -> None:
    """End this process as a lost machine does."""
    os.kill(os.getpid(), signal.SIGKILL)


def nth(count: int, do: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return `do`, except that the call of this number is `instead`."""
    calls = iter(range(1, 1_000_000))
    return lambda *given: (instead if next(calls) == count else do)(*given)


def trap(point: str, count: int) -> str:
    """Set the trap of a point; return the failpoint that it needs."""
    write, publish = ArchiveDirectory.write, ArchiveDirectory.publish

    def write_half(self: ArchiveDirectory, grant: Any, bundle: Any, hour: Any, content: Any) -> None:
        write(self, grant, bundle, hour, content.slice(0, content.size // 2))
        kill()

    def write_whole(*given: Any) -> None:
        write(*given)
        kill()

    def publish_and_kill(*given: Any) -> None:
        publish(*given)
        kill()

    if point == "writing":
        ArchiveDirectory.write = nth(count, write, write_half)  # type: ignore[method-assign]
    elif point == "written":
        ArchiveDirectory.write = nth(count, write, write_whole)  # type: ignore[method-assign]
    elif point == "committed":
        ArchiveDirectory.publish = nth(count, publish, lambda *_: kill())  # type: ignore[method-assign]
    elif point == "published":
        ArchiveDirectory.publish = nth(count, publish, publish_and_kill)  # type: ignore[method-assign]
    return f"after_fence:{count}:kill" if point == "fenced" else ""


def trap_compaction(point: str, count: int) -> None:
    """Set the trap of a point of compaction."""
    rewrite, publish, delete = ArchiveDirectory.rewrite, ArchiveDirectory.publish, ArchiveDirectory.delete

    def after(do: Callable[..., Any]) -> Callable[..., Any]:
        def do_and_kill(*given: Any) -> None:
            do(*given)
            kill()

        return do_and_kill

    if point == "rewritten":
        ArchiveDirectory.rewrite = nth(count, rewrite, after(rewrite))  # type: ignore[method-assign]
    elif point == "listed":
        ArchiveDirectory.publish = nth(count, publish, lambda *_: kill())  # type: ignore[method-assign]
    elif point == "renamed":
        ArchiveDirectory.publish = nth(count, publish, after(publish))  # type: ignore[method-assign]
    elif point == "deleted":
        ArchiveDirectory.delete = nth(count, delete, after(delete))  # type: ignore[method-assign]


async def compact(source: Path, url: str, directory: Path) -> None:
    """Merge all small files, as maintenance does."""
    graph, clock = archived_graph(source), SystemClock()
    into = ArchiveInto(directory, every_s=0.0, compact_after_s=0.0)
    kept = dict.fromkeys(("dead_letter_kept_s", "settled_kept_s", "events_kept_s"), 1e9)
    async with ArchivingStore(url, into, clock, limits=LIMITS) as store:
        deployed = await store.deploy(graph.spec())
        worker = WorkerInfo(random_id(), deployed.graph_id, deployed.version, archives_of(graph))
        await store.register(worker, LIMITS.lease_ttl_s)
        ids = [i.interval_id for name in archives_of(graph) for i in deployed.intervals_of(name)]
        await store.read(await store.seize(worker.worker_id, ids), state_rows_max=1)
        while await store.forget_old(now_us=clock.now_us(), **kept):
            pass


def archive(source: Path, url: str, directory: Path, failpoint: str = "") -> None:
    """Archive to the end."""
    graph = archived_graph(source)
    points = CrashFailpoints(parse_spec(failpoint))
    into = ArchiveInto(directory, every_s=0.0)
    asyncio.run(run_worker(graph, url, limits=LIMITS, only=archives_of(graph), archive=into, failpoints=points))


def main(source: str, url: str, directory: str, *points: str) -> int:
    """Run the archivers; return the exit status."""
    of, to = Path(source), Path(directory)
    compacting = [text for text in points if text.partition(":")[0] in COMPACTION_POINTS]
    for text in [text for text in points if text not in compacting]:
        point, _, count = text.partition(":")
        if not is_killed(lambda: archive(of, url, to, trap(point, int(count))), text):  # noqa: B023
            return 1
    archive(of, url, to)
    for text in compacting:
        point, _, count = text.partition(":")
        if not is_killed(lambda: (trap_compaction(point, int(count)), asyncio.run(compact(of, url, to))), text):  # noqa: B023
            return 1
    if compacting:
        asyncio.run(compact(of, url, to))
    return 0


def is_killed(run: Callable[[], Any], text: str) -> bool:
    """Run something in a forked process; return whether it is killed."""
    child = os.fork()
    if not child:
        run()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        print(f"{text} was not reached", file=sys.stderr)
    return os.WIFSIGNALED(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

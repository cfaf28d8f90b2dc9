"""Archivers that are killed one after another: `python -m tests.crash.archiver INPUT DATABASE DIRECTORY POINT…`.

A POINT is one of `POINTS` with the number of the call at which it kills, as in `written:2`. Each has a forked process,
so that the imports are paid once. The last archiver is not killed; the exit status is its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millpy.limits import Limits
from millpy.process.assembly import archives_of, run_worker
from millpy.store.archive.directory import ArchiveDirectory
from millpy.store.postgres.archiving import ArchiveInto
from millpy.testing.crash import CrashFailpoints, parse_spec
from tests.crash.archive_graph import archived_graph

LIMITS = Limits(lease_ttl_s=0.5, bundle_records_max=20)
POINTS = ("writing", "written", "fenced", "committed", "published")


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


def archive(source: Path, url: str, directory: Path, failpoint: str = "") -> None:
    """Archive to the end."""
    graph = archived_graph(source)
    points = CrashFailpoints(parse_spec(failpoint))
    into = ArchiveInto(directory, every_s=0.0)
    asyncio.run(run_worker(graph, url, limits=LIMITS, only=archives_of(graph), archive=into, failpoints=points))


def main(source: str, url: str, directory: str, *points: str) -> int:
    """Run the archivers; return the exit status."""
    for text in points:
        point, _, count = text.partition(":")
        child = os.fork()
        if not child:
            archive(Path(source), url, Path(directory), trap(point, int(count)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            print(f"{text} was not reached", file=sys.stderr)
            return 1
    archive(Path(source), url, Path(directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

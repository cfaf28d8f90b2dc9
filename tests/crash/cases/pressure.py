"""A database that has no room or no time: disk full, statement timeouts, deadlocks. Tried again until there is."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psycopg

from millpy.embedded import EmbeddedPostgres
from millpy.errors import StoreUnavailableError
from millpy.hosting.failpoints import Failpoint
from tests.crash.harness import LEASE_S, Worker, await_true
from tests.crash.world import Case, Skipped, World

VOLUME_MB = 320
SMALL = {"max_wal_size": "64MB", "min_wal_size": "32MB"}
FULL_S = 2.0
WAITING = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'millpy commit' AND wait_event_type = 'Lock'"


def cases() -> Iterator[Case]:
    """Room first, then time."""
    yield Case("disk full", "tables", partial(_disk_full, log_too=False))
    yield Case("disk full", "tables and WAL", partial(_disk_full, log_too=True))
    yield Case("statement timeout", "table locked", partial(_timed_out, lock="LOCK TABLE mill.deltas"))
    yield Case("statement timeout", "headers locked", partial(_timed_out, lock="SELECT FROM mill.intervals FOR UPDATE"))
    yield Case("deadlock", "", _deadlock)


def _volume(world: World) -> Path:
    """Mount a small file system. Raises Skipped without the right to mount one."""
    place = world.directory / "volume"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_MB}m,mode=0711", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise Skipped(f"no right to mount a small volume: {done.stderr.strip()}")
    world.stack.callback(subprocess.run, ["umount", "--lazy", str(place)], check=False)
    return place


def _disk_full(world: World, log_too: bool) -> None:
    volume = _volume(world)
    server = world.own_server(volume / "postgres", **SMALL)
    if not log_too:
        _move_log(server, world.directory / "wal")
    worker = world.worker(bundle_records_max=30)
    worker.await_reached(Failpoint.AFTER_COMMIT, 10)
    ballast = volume / "ballast"
    _fill(ballast)
    if log_too:
        _fill_log(world)
    worker.await_while_running(lambda: "StoreUnavailableError" in worker.log, "notices that the disk is full")
    time.sleep(FULL_S)
    before = worker.reached(Failpoint.AFTER_COMMIT)
    ballast.unlink()
    freed_at = time.monotonic()
    with suppress(StoreUnavailableError):  # it is just starting by itself
        server.restart()  # nothing, unless it has given up
    recovery = world.hurt(fenced=False)
    recovery.started = freed_at
    recovery.wait(watched=worker)
    log = (server.directory / "log").read_text(errors="replace")
    world.notes.append(f"{before} commits before there was room again{', the server had stopped' * ('PANIC' in log)}")
    world.await_finished(worker)


def _move_log(server: EmbeddedPostgres, to: Path) -> None:
    """Leave the write-ahead log outside of the volume, so that only tables run out of room."""
    server.kill()
    source = server.data / "pg_wal"
    shutil.copytree(source, to)
    stat = source.stat()
    for path in (to, *to.rglob("*")):
        shutil.chown(path, stat.st_uid, stat.st_gid)
    shutil.rmtree(source)
    source.symlink_to(to)
    for parent in to.parents:
        with suppress(PermissionError):
            parent.chmod(parent.stat().st_mode | 0o111)
    server.restart()


def _fill(ballast: Path) -> None:
    """Take all the room that is left, to the last page."""
    for size in (1_000_000, 4096):
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"\0" * size):
                pass


def _fill_log(world: World) -> None:
    """Another session writes until the disk of the log is full and the server stops."""
    with suppress(psycopg.OperationalError), psycopg.connect(world.url, autocommit=True) as connection:
        for _ in range(VOLUME_MB):
            connection.execute("SELECT pg_logical_emit_message(false, 'ballast', repeat('x', 1000000))")
    log = (world.server.directory / "log").read_text(errors="replace")
    assert "No space left on device" in log, log[-2000:]


def _timed_out(world: World, lock: str) -> None:
    """Hold a lock for longer than the statement timeout, twice."""
    worker = world.worker(bundle_records_max=30, statement_s=4)
    for times in (10, 60):
        worker.await_reached(Failpoint.AFTER_COMMIT, times)
        with psycopg.connect(world.url) as other:
            other.execute(lock)
            already = worker.log.count("statement timeout")
            await_true(lambda a=already: worker.log.count("statement timeout") > a, "timed out")
            time.sleep(2 * LEASE_S)
            other.rollback()
        world.hurt(fenced=False).wait(watched=worker)
    world.await_finished(worker)


def _deadlock(world: World) -> None:
    """The other side of the cycle never looks for deadlocks: the worker's commit is always the victim."""
    with psycopg.connect(world.url, autocommit=True) as setting:
        setting.execute(f"ALTER DATABASE {setting.info.dbname} SET deadlock_timeout = '400ms'")
    worker = world.worker(bundle_records_max=30)
    worker.await_reached(Failpoint.AFTER_COMMIT, 10)
    watching = world.connect()
    for times in (1, 2, 3):
        deadline = time.monotonic() + 60
        while worker.log.count("deadlock detected") < times:
            assert time.monotonic() < deadline, worker.log[-2000:]
            _cross(world, watching, worker)
        world.hurt(fenced=False).wait(watched=worker)
    world.await_finished(worker)


def _cross(world: World, watching: psycopg.Connection, worker: Worker) -> None:
    """Lock what a commit locks last, let it wait, then request what it has locked first."""
    with psycopg.connect(world.url) as other:
        other.execute("SET deadlock_timeout = '60s'")
        other.execute("LOCK TABLE crash.marks IN SHARE ROW EXCLUSIVE MODE")
        worker.await_while_running(lambda: watching.execute(WAITING).fetchone() == (1,), "its commit waits")
        other.execute("SELECT FROM mill.intervals FOR UPDATE")
        other.rollback()

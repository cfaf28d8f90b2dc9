"""The primary dies and a standby takes its place: an asynchronous one lacks commits, a synchronous one has all."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from functools import partial

import psycopg

from millpy.embedded import EmbeddedPostgres, binaries
from millpy.hosting.failpoints import Failpoint
from tests.crash.harness import Worker, await_true, committed
from tests.crash.world import Case, World

MORE = 20
SILENT_S = 1.5


def cases() -> Iterator[Case]:
    """Both kinds of replication."""
    yield Case("failover to a standby", "asynchronous", partial(_failover, synchronous=False))
    yield Case("failover to a standby", "synchronous", partial(_failover, synchronous=True))


def _failover(world: World, synchronous: bool) -> None:
    primary = world.own_server()
    standby = _standby(world, primary)
    if synchronous:
        _alter(primary, "synchronous_standby_names", "*")
    first = world.worker(bundle_records_max=30)
    first.await_reached(Failpoint.AFTER_COMMIT, MORE)
    _alter(standby, "primary_conninfo", "")  # from here on it hears nothing more
    await_true(lambda: _one(primary, "SELECT count(*) FROM pg_stat_replication") == 0, "nobody listens")
    before = first.reached(Failpoint.AFTER_COMMIT)
    if synchronous:
        time.sleep(SILENT_S)
        assert first.reached(Failpoint.AFTER_COMMIT) <= before + 1, "it commits without its standby"
    else:
        first.await_reached(Failpoint.AFTER_COMMIT, before + MORE)
    known = committed(world.url)
    died_at = time.monotonic()
    primary.kill()
    first.kill()
    world.kills += 2
    again = _promoted(world, standby)
    lacking = sum(max(0, known[interval] - bundle) for interval, bundle in committed(world.url).items())
    recovery = world.hurt(fenced=True)
    recovery.started = died_at
    recovery.wait(watched=again)
    world.await_finished(again)
    if synchronous:
        world.notes.append("commits waited for the standby")
    else:
        assert lacking, "the standby had everything"
        world.notes.append(f"the standby lacked {lacking} bundles that were committed; they were read again")


def _standby(world: World, primary: EmbeddedPostgres) -> EmbeddedPostgres:
    """A copy that replicates."""
    directory = world.directory / "standby"
    directory.mkdir()
    data = directory / "data"
    tool = binaries(primary.version) / "pg_basebackup"
    # By TCP: if we are root, the standby runs as a user who cannot reach the socket.
    command = [tool, "-d", primary.tcp_url(), "-D", data, "-R", "-X", "stream", "-c", "fast"]
    subprocess.run([str(word) for word in command], check=True, capture_output=True)
    owner = primary.data.stat()
    for path in (data, *data.rglob("*")):
        shutil.chown(path, owner.st_uid, owner.st_gid)
    (directory / "version").write_text(f"{primary.version}\n")
    shutil.copy2(primary.directory / "password", directory)
    standby = world.stack.enter_context(EmbeddedPostgres(directory, tcp=True))
    world.stack.callback(standby.kill)
    await_true(lambda: _one(primary, "SELECT count(*) FROM pg_stat_replication") == 1, "the standby listens")
    return standby


def _promoted(world: World, standby: EmbeddedPostgres) -> Worker:
    """Promote the standby; a worker continues there."""
    _one(standby, "SELECT pg_promote()")
    _alter(standby, "synchronous_standby_names", "")
    world.move(standby.url("own"))
    return world.worker(bundle_records_max=30)


def _one(server: EmbeddedPostgres, query: str) -> object:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        row = connection.execute(query).fetchone()
    return row[0] if row else None


def _alter(server: EmbeddedPostgres, name: str, value: str) -> None:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET {name} = '{value}'")
        connection.execute("SELECT pg_reload_conf()")

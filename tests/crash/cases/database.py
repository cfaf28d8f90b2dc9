"""What a database does to its clients: ends their sessions, dies, is not there when a worker starts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from functools import partial

from millpy.hosting.failpoints import Failpoint
from tests.crash.harness import Worker
from tests.crash.world import Case, World

SESSIONS = (
    "SELECT pid, application_name FROM pg_stat_activity"
    " WHERE datname = current_database() AND application_name LIKE 'millpy %' ORDER BY pid"
)
TERMINATIONS = 12


def cases() -> Iterator[Case]:
    """Each with one worker and with two."""
    for number in (1, 2):
        variant = "one worker" if number == 1 else "two workers"
        yield Case("pg_terminate_backend at random", variant, partial(_terminated, number=number))
        yield Case("PostgreSQL killed and restarted", variant, partial(_killed, number=number))
        yield Case("PostgreSQL and a worker killed", variant, partial(_both_killed, number=number))
    yield Case("worker started while PostgreSQL is down", "", _started_while_down)


def _workers(world: World, number: int) -> list[Worker]:
    workers = [world.worker(bundle_records_max=20) for _ in range(number)]
    for worker in workers:
        worker.await_reached(Failpoint.AFTER_COMMIT, 10 if number == 1 else 1)
    return workers


def _terminated(world: World, number: int) -> None:
    rng = random.Random(number)
    workers = _workers(world, number)
    connection = world.connect()
    ended = []
    for _ in range(TERMINATIONS):
        time.sleep(rng.uniform(0, 0.1))
        pid, name = rng.choice(connection.execute(SESSIONS).fetchall())
        connection.execute("SELECT pg_terminate_backend(%s)", [pid])
        ended.append(name.removeprefix("millpy "))
        world.hurt(fenced=False).wait(watched=workers[0])
    world.notes.append(f"ended: {' '.join(ended)}")
    world.await_finished(*workers)


def _killed(world: World, number: int) -> None:
    server = world.own_server()
    workers = _workers(world, number)
    for _ in range(2):
        started = time.monotonic()
        server.kill()
        world.kills += 1
        server.restart()
        recovery = world.hurt()
        recovery.started = started
        recovery.wait(watched=workers[0])
    world.await_finished(*workers)


def _both_killed(world: World, number: int) -> None:
    """At the same moment, as when a machine loses its power."""
    server = world.own_server()
    workers = _workers(world, number)
    started = time.monotonic()
    server.kill()
    workers[0].kill()
    world.kills += 2
    server.restart()
    recovery = world.hurt()
    recovery.started = started
    again = world.worker()
    recovery.wait(watched=again)
    world.await_finished(again, *workers[1:])


def _started_while_down(world: World) -> None:
    server = world.own_server()
    (early,) = _workers(world, 1)
    started = time.monotonic()
    server.kill()
    late = world.worker()
    late.await_while_running(lambda: "cannot reach the database" in late.log, "says that there is no database")
    early.kill()
    world.kills += 2
    server.restart()
    recovery = world.hurt()
    recovery.started = started
    recovery.wait(watched=late)
    world.await_finished(late)

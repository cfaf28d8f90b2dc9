"""What a network does to connections, above all around COMMIT: unknown outcomes are resolved, once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from math import inf

from psycopg import conninfo

from millpy.testing.crash_test.database import url_through_proxy
from millpy.testing.proxy import CommitFault, PostgresProxy
from tests.crash.harness import LEASE_S, Worker
from tests.crash.world import Case, World

# Delay, and what the server says to a commit whose client is gone; inf: behind the recovery, however long that takes.
ANSWERS = [
    (CommitFault.SWALLOW, 0.0, b"COMMIT\0"),
    (CommitFault.LATE_COMMIT, 0.05, b"COMMIT\0"),  # who takes over from itself waits for it
    (CommitFault.LATE_COMMIT, inf, b"57P01"),  # but not endlessly
    (CommitFault.LATE_PIPELINE, inf, b"MW001"),
    (CommitFault.CUT_COMMIT, 0.0, b""),
]
COMMITS_BETWEEN = 8


def cases() -> Iterator[Case]:
    """Yield faults around COMMIT and anywhere, with and without a second worker on its own connection."""
    for company in (False, True):
        variant = "two workers" if company else "one worker"
        for fault, delay_s, answer in ANSWERS:
            name = f"{fault} after {'the recovery' if delay_s == inf else f'{delay_s} s'}" if delay_s else fault
            run = partial(_around_commit, fault=fault, delay_s=delay_s, answer=answer, company=company)
            yield Case(f"network: {name}", variant, run)
        yield Case("network: cut", variant, partial(_cut, company=company))
        yield Case("network: stalled, then cut", variant, partial(_stalled_and_cut, company=company))
        yield Case("network: stalled past the lease", variant, partial(_stalled, company=company))
        yield Case("network: connections silent for ever", variant, partial(_forsaken, company=company))


def _through_proxy(world: World, company: bool, delay_s: float = 0.3) -> tuple[PostgresProxy, Worker, list[Worker]]:
    """Start a worker behind a proxy, and perhaps another one with a direct connection."""
    parts = conninfo.conninfo_to_dict(world.server.tcp_url())
    proxy = world.stack.enter_context(PostgresProxy(str(parts["host"]), int(str(parts["port"])), delay_s=delay_s))
    by_tcp = world.server.tcp_url(str(conninfo.conninfo_to_dict(world.url)["dbname"]))
    worker = world.worker(url_through_proxy(by_tcp, proxy.port), bundle_records_max=20, epoch_s=3_600)
    await_commits(proxy, worker)
    return proxy, worker, [world.worker(bundle_records_max=20, epoch_s=3_600)] if company else []


def await_commits(proxy: PostgresProxy, worker: Worker, more: int = COMMITS_BETWEEN) -> None:
    """Until the worker has committed again."""
    already = proxy.commits
    worker.await_while_running(lambda: proxy.commits > already + more, f"{more} commits")


def _around_commit(world: World, fault: CommitFault, delay_s: float, answer: bytes, company: bool) -> None:
    behind = delay_s == inf
    proxy, worker, others = _through_proxy(world, company, 0.0 if behind else delay_s)
    for times in (1, 2, 3):
        await_commits(proxy, worker)
        if behind:
            proxy.may_land.clear()
        proxy.arm(fault)
        worker.await_while_running(lambda times=times: proxy.struck >= times, "struck")
        recovery = world.hurt([worker.process.pid])
        if behind:
            recovery.wait(watched=worker)
            proxy.may_land.set()
        if fault is not CommitFault.CUT_COMMIT:
            assert proxy.landed.wait(60), "the answer was never complete"
            assert answer in proxy.lost_answers[-1], proxy.lost_answers[-1]
        if not behind:
            recovery.wait(watched=worker)
    world.await_finished(worker, *others)


# Without a commit in flight a new connection suffices and no interval is taken over, so these are not fenced.


def _cut(world: World, company: bool) -> None:
    proxy, worker, others = _through_proxy(world, company)
    for _ in range(3):
        await_commits(proxy, worker)
        proxy.cut()
        world.hurt([worker.process.pid], fenced=False).wait(watched=worker)
    world.await_finished(worker, *others)


def _stalled_and_cut(world: World, company: bool) -> None:
    proxy, worker, others = _through_proxy(world, company)
    proxy.stall(True)
    recovery = world.hurt([worker.process.pid], fenced=False)
    proxy.cut()
    proxy.stall(False)
    recovery.wait(watched=worker)
    world.await_finished(worker, *others)


def _stalled(world: World, company: bool) -> None:
    """Nothing passes until the lease is over; then everything in flight arrives at once."""
    proxy, worker, others = _through_proxy(world, company)
    proxy.stall(True)
    recovery = world.hurt([worker.process.pid])
    if others:
        recovery.wait(watched=others[0])
    time.sleep(1.5 * LEASE_S)
    proxy.stall(False)
    if not others:
        recovery.wait(watched=worker)
    world.await_finished(worker, *others)


def _forsaken(world: World, company: bool) -> None:
    """Connections that neither answer nor end, as behind a hanging pooler; new connections work."""
    proxy, worker, others = _through_proxy(world, company)
    for times in range(2):
        if times:
            await_commits(proxy, worker)
        proxy.forsake()
        world.hurt([worker.process.pid], fenced=False).wait(watched=worker)
    world.await_finished(worker, *others)

"""Kafka to Kafka while workers, the network and the broker fail: nothing is lost, doubled or out of order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

from millpy.hosting.failpoints import Failpoint
from tests.crash.cases.sources import shared_broker
from tests.crash.harness import LEASE_S
from tests.crash.kafka_to_kafka import NUMBER, TRANSACTION_TIMEOUT_S, Pipe
from tests.crash.sinks import POINTS
from tests.crash.world import Case, World
from tests.kafka_proxy import END_TXN, TXN_OFFSET_COMMIT, KafkaProxy, RequestFault
from tests.kafka_server import KafkaServer

NAME = "Kafka to Kafka: {}"
BOTH = ("one worker", "two workers")


def cases() -> Iterator[Case]:
    """Kills and frozen workers, the network, and the servers; with one worker and with two."""
    for company, variant in enumerate(BOTH):
        yield Case(NAME.format("SIGKILL three times"), variant, partial(killed, company=bool(company)))
        yield Case(NAME.format("network cut"), variant, partial(cut, company=bool(company)))
        yield Case(NAME.format("network stalled past the lease"), variant, partial(stalled, company=bool(company)))
        for point in POINTS[1:]:
            name = NAME.format(f"SIGSTOP beyond the transaction's timeout, {point}")
            yield Case(name, variant, partial(frozen, point=point, company=bool(company)))
    for api, of in ((END_TXN, "EndTxn"), (TXN_OFFSET_COMMIT, "TxnOffsetCommit")):
        for fault in RequestFault:
            name = NAME.format(f"{of}, {fault.value}")
            yield Case(name, "", partial(request_lost, api, fault, None, NUMBER))
    for point in ("before", "produced"):
        yield Case(NAME.format(f"broker killed in a transaction, {point}"), "", partial(broker_killed, point=point))
    yield Case(NAME.format("PostgreSQL killed and restarted"), "", server_killed)


def killed(world: World, company: bool, server: KafkaServer | None = None, number: int = NUMBER) -> None:
    """Kill the worker that sends, thrice; the next one, or the other one, takes over."""
    pipe = Pipe(world, server or shared_broker(), number)
    pipe.publish(0, number // 2)
    worker = pipe.worker()
    others = [pipe.worker()] if company else []
    for times in range(3):
        pipe.await_sent(worker, (times + 1) * number // 8)
        world.kill(worker)
        worker = pipe.worker()
    pipe.publish(number // 2, number)
    pipe.finish(worker, *others)


def frozen(world: World, point: str, company: bool, server: KafkaServer | None = None, number: int = NUMBER) -> None:
    """Freeze a worker inside a send, longer than its lease and its transaction last; then let it go on."""
    pipe = Pipe(world, server or shared_broker(), number)
    pipe.publish(0, number)
    one = pipe.worker(f"{point}:4:stop")
    one.await_frozen()
    others = [pipe.worker()] if company else []
    if others:
        pipe.await_sent(others[0], number // 2)
    time.sleep(TRANSACTION_TIMEOUT_S + LEASE_S)
    one.thaw()
    pipe.finish(one, *others)
    assert "restored from a backup" not in one.log, one.log[-3000:]


def cut(world: World, company: bool, server: KafkaServer | None = None, number: int = NUMBER) -> None:
    """Cut all connections to the broker, time and again."""
    pipe = Pipe(world, server or shared_broker(), number)
    with KafkaProxy(pipe.server) as proxy:
        pipe.publish(0, number)
        worker = pipe.worker(address=pipe.server.proxied)
        others = [pipe.worker(address=pipe.server.proxied)] if company else []
        for times in range(5):
            pipe.await_sent(worker, times * number // 8)
            proxy.cut()
        pipe.finish(worker, *others)


def stalled(world: World, company: bool, server: KafkaServer | None = None, number: int = NUMBER) -> None:
    """Nothing passes for longer than a transaction may last; then everything in flight arrives at once."""
    pipe = Pipe(world, server or shared_broker(), number)
    with KafkaProxy(pipe.server) as proxy:
        pipe.publish(0, number)
        worker = pipe.worker(address=pipe.server.proxied)
        others = [pipe.worker()] if company else []
        pipe.await_sent(worker, number // 8)
        proxy.stall(True)
        time.sleep(TRANSACTION_TIMEOUT_S + LEASE_S)
        proxy.stall(False)
        pipe.finish(worker, *others)


def request_lost(api: int, fault: RequestFault, server: KafkaServer | None, number: int, world: World) -> None:
    """Lose requests of transactions and their answers; late ones arrive while the next transactions are open."""
    pipe = Pipe(world, server or shared_broker(), number)
    with KafkaProxy(pipe.server) as proxy:
        pipe.publish(0, number // 4)
        worker = pipe.worker(address=pipe.server.proxied)
        for times in (1, 2, 3):
            pipe.await_sent(worker, times * number // 8)
            proxy.arm(api, fault)
            pipe.publish(times * number // 4, (times + 1) * number // 4)  # so that a transaction follows
            worker.await_while_running(lambda times=times: proxy.struck >= times, "struck")
            pipe.await_sent(worker, pipe.left()[1] + 1)
            proxy.land()
        world.kill(worker)  # what the database knows of the topic is older than the topic
        pipe.finish(pipe.worker())


def broker_killed(world: World, point: str, server: KafkaServer | None = None, number: int = NUMBER) -> None:
    """Kill the broker and restart it while a transaction is open, whose worker continues then."""
    pipe = Pipe(world, server or shared_broker(), number)
    pipe.publish(0, number)
    worker = pipe.worker(f"{point}:4:stop")
    worker.await_frozen()
    pipe.server.kill()
    world.kills += 1
    pipe.server.start()
    worker.thaw()
    pipe.finish(worker)


def server_killed(world: World, server: KafkaServer | None = None) -> None:
    """Kill PostgreSQL twice under two workers."""
    postgres = world.own_server()
    pipe = Pipe(world, server or shared_broker())
    pipe.publish(0, NUMBER)
    workers = [pipe.worker(), pipe.worker()]
    workers[0].await_reached(Failpoint.AFTER_COMMIT, 5)
    for _ in range(2):
        postgres.kill()
        world.kills += 1
        postgres.restart()
        pipe.await_sent(workers[0], pipe.left()[1] + 20)
    pipe.finish(*workers)

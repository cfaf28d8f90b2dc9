"""A recorded feed through a real broker into real worker processes, some of which are killed on the way."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

from millpy.embedded import EmbeddedBroker
from tests.crash.checks import Observer
from tests.crash.harness import Worker, await_true
from tests.feeds.feed import Feed, Message

GENTLE = {"bundle_records_max": 5_000, "fold_every_s": 2, "epoch_s": 10, "progress_every_s": 0.1}
TRAPS = ("after_commit:10:kill", "after_commit:25:kill")
"""Of the first workers: a turn is committed and its messages are not acknowledged."""
PUBLISH_S_MAX, SETTLE_S_MAX = 600, 600


class Publisher:
    """Publishes with QoS 1; lanes side by side, each in its order."""

    def __init__(self, broker: EmbeddedBroker) -> None:
        self.client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
        self.client.max_inflight_messages_set(500)
        self.client.connect(broker.host, broker.port)
        self.client.loop_start()
        self.sent = 0

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.disconnect()
        self.client.loop_stop()

    def say_hello(self, topics: tuple[str, ...]) -> None:
        """Publish an invalid payload, which becomes a dead letter at every subscriber."""
        for topic in topics:
            self.client.publish(topic, b"hello", qos=1).wait_for_publish(5)

    def publish(self, lanes: list[Iterator[Message]], may_continue: list[tuple[int, threading.Event]]) -> None:
        """Publish all; at each mark wait until a worker has been killed."""
        while lanes:
            for lane in list(lanes):
                message = next(lane, None)
                if message is None:
                    lanes.remove(lane)
                    continue
                last = self.client.publish(*message, qos=1)
                self.sent += 1
                if self.sent % 1000 == 0:
                    last.wait_for_publish(30)
            while may_continue and self.sent >= may_continue[0][0]:
                assert may_continue.pop(0)[1].wait(60)
        last.wait_for_publish(30)


def run_through_mqtt(feed: Feed, directory: Path, url: str, broker: EmbeddedBroker, kills: int) -> list[str]:
    """Publish a whole feed to workers of which the first are killed, and one at each of some marks.

    Returns:
        What an observer saw go wrong meanwhile.
    """
    os.environ["FEED_BROKER"] = f"{broker.host}:{broker.port}"
    total = sum(1 for lane in feed.lanes(feed) for _ in lane)
    marks = [((number + 1) * total // (kills + 1), threading.Event()) for number in range(kills)]

    def worker(failpoint: str = "") -> Worker:
        return Worker(directory, url, Path("none"), graph=feed.graph, failpoint=failpoint, **GENTLE)

    try:
        with Observer(url, every_s=0.25) as observer, Publisher(broker) as publisher, ExitStack() as stack:
            workers = [stack.enter_context(worker(trap)) for trap in TRAPS]
            await_true(lambda: _all_listen(url, feed, publisher), "all listen", 60)
            publishing = threading.Thread(target=publisher.publish, args=(feed.lanes(feed), list(marks)), daemon=True)
            publishing.start()
            for trapped in list(workers):
                await_true(
                    lambda trapped=trapped: trapped.process.poll() is not None or publisher.sent >= marks[0][0],
                    "trapped",
                    60,
                )
                workers.remove(trapped)
                trapped.kill()
                workers.append(stack.enter_context(worker()))
            for mark, event in marks:
                await_true(lambda mark=mark: publisher.sent >= mark, "published", PUBLISH_S_MAX)
                workers.pop(0).kill()
                observer.look_now()
                workers.append(stack.enter_context(worker()))
                event.set()
            publishing.join(PUBLISH_S_MAX)
            await_true(lambda: all_over(url, feed), f"all is over; {workers[0].log[-2000:]}", SETTLE_S_MAX)
            for survivor in workers:
                survivor.drain()
                survivor.await_finished()
        return list(observer.faults)
    finally:
        del os.environ["FEED_BROKER"]


def _all_listen(url: str, feed: Feed, publisher: Publisher) -> bool:
    """Whether every injector has dead-lettered a message that is no record: then its subscription stands."""
    publisher.say_hello(feed.hello)
    time.sleep(0.1)
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute("SELECT count(DISTINCT stream) FROM mill.dead_letters").fetchone()
    return row is not None and row[0] == feed.injectors


def all_over(url: str, feed: Feed) -> bool:
    """Whether every stage has seen the message that closes all windows."""
    with psycopg.connect(url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT min(i.low_watermark) FROM mill.intervals i JOIN mill.computations c USING (computation_id)"
            " WHERE c.kind = 'stage'"
        ).fetchone()
    time.sleep(0.1)
    return row is not None and row[0] is not None and row[0] > feed.ends_at * 1_000_000 // feed.per_s

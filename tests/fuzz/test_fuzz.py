"""Whatever is sent, nothing stops a feed, and every payload is accepted, a duplicate or a dead letter (I8).

One worker on PostgreSQL for the whole test; each example is a batch for all of its sources. `make fuzz MINUTES=60`
runs longer, with other examples each time.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from millpy.limits import Limits
from millpy.process.assembly import run_worker
from tests.feed import Feed
from tests.fuzz.graph import HEADER, a_graph
from tests.fuzz.payloads import batches, tables
from tests.fuzz.reference import Field, Shape, csv_record, json_record

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
LIMITS = Limits(
    record_bytes_max=4_000,
    bundle_bytes_max=1_000_000,
    fold_every_s=1.0,
    progress_every_s=0.02,
    retry_s_max=0.5,
    dead_letter_records_max=10**9,
    dead_letter_bytes_max=10**12,
)
WAIT_S = 60.0
RECORD_BYTES = LIMITS.record_bytes_max
REFUSED = "SELECT dead_letter_id, stream, computation, reason, payload FROM mill.dead_letters WHERE dead_letter_id > %s"
ACCOUNT = "SELECT stream, injected, accepted, duplicate, dead_lettered FROM millpy.sources"


class Running:
    """A worker in its own thread, and everything that was sent to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.feeds = {"flat": Feed(), "nested": Feed(), "table": Feed(header=HEADER)}
        self.sent: Counter[str] = Counter()
        self.seen = 0
        self.error: BaseException | None = None
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="fuzzed worker")
        self.thread.start()

    def _run(self) -> None:
        graph = a_graph(**self.feeds)
        try:
            self.loop.run_until_complete(run_worker(graph, self.url, limits=LIMITS))
        except BaseException as error:
            self.error = error
        finally:
            self.loop.close()

    def send(self, batches: Mapping[str, Sequence[bytes]]) -> None:
        """Give each source its batch and wait until all of it is committed."""
        for stream, payloads in batches.items():
            self.sent[stream] += len(payloads)
            self.loop.call_soon_threadsafe(self.feeds[stream].push, *payloads)
        self._wait(
            lambda: all(feed.pushed == self.sent[n] and not feed.unacknowledged for n, feed in self.feeds.items())
        )

    def end(self) -> None:
        if self.thread.is_alive():
            for feed in self.feeds.values():
                self.loop.call_soon_threadsafe(feed.end)
        self.thread.join(WAIT_S)

    def _wait(self, holds: Any) -> None:
        until = time.monotonic() + WAIT_S
        while not holds():
            assert self.error is None, f"the worker stopped: {self.error!r}"
            assert self.thread.is_alive(), "the worker left"
            assert time.monotonic() < until, f"nothing moves for {WAIT_S} s"
            time.sleep(0.002)

    def check(self, sent: Mapping[str, Sequence[bytes]]) -> None:
        """The dead letters of a batch are the records that the reference rejects, byte for byte as sent."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            dead_letters = connection.execute(REFUSED, [self.seen]).fetchall()
        self.seen = max((number for number, *_ in dead_letters), default=self.seen)
        for stream, payloads in sent.items():
            read = [(reason, payload) for _, of, by, reason, payload in dead_letters if of == stream == by]
            refused = [payload for payload in payloads if is_refused(stream, payload)]
            unread = Counter(payload[: RECORD_BYTES + 1] for payload in refused)  # of a longer one as much is kept
            found = Counter(payload for reason, payload in read if reason not in ("future", "key"))
            if self.feeds[stream].given_again:  # the machine was so slow that a commit's outcome was not known
                assert set(found) == set(unread)
            else:
                assert found == unread, (stream, list(found - unread)[:3], list(unread - found)[:3])
                assert not Counter(payload for _, payload in read) - Counter(
                    sent[: RECORD_BYTES + 1] for sent in payloads
                )

    def account(self) -> None:
        """Every payload is counted once, at every step."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            sources = connection.execute(ACCOUNT).fetchall()
            unbalanced = connection.execute("SELECT * FROM millpy.accounting WHERE NOT balanced").fetchall()
            stored = connection.execute("SELECT count(*) FROM millpy.state").fetchall()
        assert unbalanced == []
        assert stored is not None
        for stream, injected, *_ in sources:
            assert self.sent[stream] <= injected <= self.sent[stream] + self.feeds[stream].given_again


FLAT = {
    "id": Field("int"), "device": Field("text"), "at": Field("time"), "count": Field("int"), "value": Field("float"),
    "flag": Field("bool"), "note": Field("text", nullable=True, default=None),
}  # fmt: skip
INNER = {"name": Field("text"), "values": Field("list", inner=Field("float"))}
NESTED = {
    "id": Field("int"), "device": Field("text"), "at": Field("time"), "value": Field("float"),
    "inner": Field("record", nullable=True, default=None, fields=INNER), "count": Field("int", default=0),
    "note": Field("object", nullable=True, default=None, inner=Field("float")),
}  # fmt: skip
"""The classes of `graph.py`, for the reference."""


def is_refused(stream: str, payload: bytes) -> bool:
    if stream == "table":
        outcome = csv_record(payload, HEADER, Shape(FLAT), bytes_max=RECORD_BYTES)
    else:
        outcome = json_record(payload, Shape(FLAT if stream == "flat" else NESTED), bytes_max=RECORD_BYTES)
    return outcome.values is None


@pytest.fixture
def running(database_url: str) -> Iterator[Running]:
    subject = Running(database_url)
    try:
        yield subject
    finally:
        subject.end()


@pytest.mark.timeout(MINUTES * 60 + 300)
def test_nothing_stops_a_feed(running: Running) -> None:
    until = time.monotonic() + MINUTES * 60
    examples = 0

    @settings(
        max_examples=120 if not MINUTES else 500,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Earlier input is part of the trial, so a smaller example proves nothing.
        phases=[Phase.generate],
        derandomize=not MINUTES,
    )
    @given(batches, tables)
    def one(payloads: list[bytes], lines: list[bytes]) -> None:
        nonlocal examples
        examples += 1
        # Sometimes enough records to be decoded as columns.
        times = 5 if examples % 4 == 0 else 1
        sent = {"flat": payloads * times, "nested": payloads * times, "table": lines * times}
        running.send(sent)
        running.check(sent)

    while True:
        one()
        running.account()
        if time.monotonic() >= until:
            break
    running.end()

    assert running.error is None, f"the worker stopped: {running.error!r}"
    assert not running.thread.is_alive(), "the worker does not leave at the end of its sources"
    running.account()
    print(f"{examples} batches, {sum(running.sent.values())} payloads")

"""A source that a test writes to: like a broker it gives again what was not acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from millpy.ingest.protocol import Source, SourceBatch, SourceSetup
from millpy.model.identity import Identity

PARTITION = "feed"


class Feed(Source):
    """Payloads in order; `push` and `end` from the test, at any time.

    Attributes:
        header: with one, payloads are CSV.
        given_again: how many payloads may have been committed before they were given once more.
    """

    def __init__(self, *, batch_max: int = 1_000, header: Sequence[str] = ()) -> None:
        self.batch_max = batch_max
        self.header = header
        self.given_again = 0
        self.unacknowledged: list[bytes] = []
        self.pushed = 0
        self.ended = False
        self._readers: list[FeedInjector] = []

    def identity(self) -> Identity:
        return {"kind": "feed"}

    def push(self, *payloads: bytes) -> None:
        self.unacknowledged.extend(payloads)
        self.pushed += len(payloads)
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        for reader in self._readers:
            reader.ready.set()

    def ends(self) -> bool:
        return True

    def partitions(self) -> tuple[str, ...]:
        return (PARTITION,)

    def connect(self, setup: SourceSetup) -> FeedInjector:
        return FeedInjector(self, setup)


class FeedInjector:
    """One connection."""

    def __init__(self, feed: Feed, setup: SourceSetup) -> None:
        self._feed = feed
        self._setup = setup
        self.ready: asyncio.Event = setup.ready
        self._given = 0
        self._said_end = False

    async def open(self, position: bytes | None) -> None:
        self._feed._readers.append(self)

    async def take(self) -> SourceBatch | None:
        feed = self._feed
        batch: Sequence[bytes] = feed.unacknowledged[self._given : self._given + feed.batch_max]
        self._given += len(batch)
        last = feed.ended and self._given == len(feed.unacknowledged) and not self._said_end
        if not batch and not last:
            return None
        self._said_end |= last
        return SourceBatch(
            "csv" if feed.header else "json",
            self._setup.clock.now_us(),
            payloads=batch,
            header=feed.header,
            describe=str,
            token=len(batch),
            finished=last,
        )

    async def acknowledge(self, token: Any) -> None:
        if self in self._feed._readers:
            del self._feed.unacknowledged[:token]
            self._given -= token

    def quiet(self) -> bool:
        return self._given == len(self._feed.unacknowledged)

    async def close(self) -> None:
        if self in self._feed._readers:
            self._feed._readers.remove(self)
            self._feed.given_again += self._given

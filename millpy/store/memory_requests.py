"""Requests in a `MemoryDatabase`: what people have said about records set aside, and what became of it.

A dead letter's id is its place in the list, from 1; a late record's is its place among all rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from millpy.errors import RequestWithdrawnError
from millpy.model.checkpoint import Checkpoint, DeadLetter, Pause, Pile, Request
from millpy.model.stage import Release
from millpy.store.protocol import Asked

if TYPE_CHECKING:
    from millpy.store.memory_database import MemoryDatabase

State = Literal["set_aside", "requested", "replayed", "discarded"]


@dataclass(slots=True)
class Standing:
    """What is said of one record: its state, how many replays failed, what it is by now."""

    state: State = "set_aside"
    attempts: int = 0
    corrected: bytes | None = None
    letter: DeadLetter | None = None


class Requests:
    """The states of all records set aside in one database, and the sources that stand still."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._standings: dict[tuple[Pile, int], Standing] = {}
        self.pauses: dict[int, Pause] = {}
        self.releases: list[Release] = []
        self._release_id = 0

    # What people do.

    def standing(self, pile: Pile, number: int) -> Standing:
        """What is said of a record."""
        return self._standings.setdefault((pile, number), Standing())

    def replay(self, pile: Pile, number: int, payload: bytes | None = None) -> bool:
        """Ask for a record to be taken again; False when it is not waiting."""
        standing = self.standing(pile, number)
        if standing.state != "set_aside" or (pile == "late_records" and not self._whole()[number - 1]):
            return False
        standing.state, standing.corrected = "requested", payload or standing.corrected
        return True

    def discard(self, pile: Pile, number: int) -> bool:
        """Give a record up; False when it is settled."""
        standing = self.standing(pile, number)
        if standing.state not in ("set_aside", "requested"):
            return False
        standing.state = "discarded"
        return True

    def resume(self, interval_id: int) -> None:
        """Let a source go on."""
        self.pauses.pop(interval_id, None)

    def release(self, interval_id: int, key: bytes, ticket: int, *, discard: bool = False) -> None:
        """Let a parked key go on."""
        self._release_id += 1
        self.releases.append(Release(self._release_id, interval_id, key, ticket, discard))

    # What the store does.

    def asked(self, interval_ids: Sequence[int], records_max: int, bytes_max: int) -> Asked:
        """See `Store.asked`."""
        found: list[Request] = []
        size = 0
        for pile in ("dead_letters", "late_records"):
            rows = self._dead() if pile == "dead_letters" else self._late()
            wanted = [r for r in rows if r.interval_id in interval_ids and self._is_requested(r)]
            for request in wanted[:records_max]:
                if size < bytes_max:
                    found.append(request)
                size += len(request.payload)
        releases = [release for release in self.releases if release.interval_id in interval_ids]
        return Asked(tuple(found), frozenset(i for i in interval_ids if i in self.pauses), tuple(releases))

    def any_of(self, interval_ids: Sequence[int]) -> bool:
        """Whether anything is asked of these intervals."""
        asked = self.asked(interval_ids, 1, 1)
        return bool(asked.requests or asked.releases)

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise unless every request that the checkpoint settles is one still."""
        gone = [s for s in checkpoint.settled if not self._is_requested(s.request)]
        if gone:
            raise RequestWithdrawnError(
                f"{len(gone)} of {len(checkpoint.settled)} records that were to be replayed have been withdrawn"
            )

    def apply(self, checkpoint: Checkpoint) -> None:
        """Change what the checkpoint says of its requests and of its source."""
        for settled in checkpoint.settled:
            standing = self.standing(settled.request.pile, settled.request.id)
            failed = settled.letter is not None or settled.watermark is not None
            standing.state = "set_aside" if failed else "replayed"
            standing.attempts += failed
            standing.letter = settled.letter or standing.letter
        self.releases = [r for r in self.releases if r.release_id not in checkpoint.release_ids]
        if checkpoint.pause is not None:
            self.pauses[checkpoint.grant.interval_id] = checkpoint.pause

    def _is_requested(self, request: Request) -> bool:
        standing = self._standings.get((request.pile, request.id))
        return standing is not None and standing.state == "requested"

    def _dead(self) -> Iterator[Request]:
        for number, (interval_id, _, letter) in enumerate(self._database.dead_letters, start=1):
            standing = self._standings.get(("dead_letters", number), Standing())
            yield Request(
                "dead_letters",
                number,
                interval_id,
                letter.stream,
                letter.computation,
                standing.corrected or letter.payload,
                input=letter.input,
                wire=letter.wire,
                position=letter.position,
                event_time=letter.event_time,
                dedupe_id=letter.dedupe_id or (standing.letter.dedupe_id if standing.letter else None),
            )

    def _whole(self) -> list[bool]:
        return [w for _, _, late in self._database.late_records for w in late.whole or [True] * len(late)]

    def _late(self) -> Iterator[Request]:
        number = 0
        for interval_id, _, late in self._database.late_records:
            for payload, event_time in zip(late.payloads, late.event_times, strict=True):
                number += 1
                yield Request(
                    "late_records",
                    number,
                    interval_id,
                    late.stream,
                    late.computation,
                    payload,
                    input=late.input,
                    event_time=event_time,
                )

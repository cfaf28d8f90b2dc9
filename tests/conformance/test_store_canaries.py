"""The store suite catches stores that are broken on purpose."""

from __future__ import annotations

import asyncio
import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any

import pytest

from millpy.errors import MillError, StoreUnavailableError
from millpy.model.checkpoint import Checkpoint, Entries, Grant
from millpy.store.memory.store import MemoryStore
from millpy.store.protocol import PollResult, SegmentQuery
from tests.conformance.memory_subject import MemorySubject
from tests.conformance.store_builders import a_world, closing
from tests.conformance.store_suite import StoreSuite


class IgnoresSequencer(MemoryStore):
    """Commits under any sequencer."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        headers = self.database.headers
        current = [
            dataclasses.replace(c, grant=Grant(c.grant.interval_id, headers[c.grant.interval_id].sequencer))
            for c in checkpoints
        ]
        await super().commit(current, **options)


class CommitsTwice(MemoryStore):
    """Takes a bundle again under the next number."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        headers = self.database.headers
        following = [dataclasses.replace(c, bundle=headers[c.grant.interval_id].bundle + 1) for c in checkpoints]
        await super().commit(following, **options)


class ReadsHeadsLater(MemoryStore):
    """Reads segments and headers in two statements."""

    async def poll(self, queries: Sequence[SegmentQuery], bytes_max: int) -> Sequence[PollResult]:
        found = await super().poll(queries, bytes_max)
        await asyncio.sleep(0)
        later = await super().poll(queries, bytes_max)
        return [
            dataclasses.replace(polled, head_seq=head.head_seq, head_watermark=head.head_watermark)
            for polled, head in zip(found, later, strict=True)
        ]


class CommitsInParts(MemoryStore):
    """Commits each interval of a turn by itself."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        for checkpoint in checkpoints:
            await super().commit([checkpoint], **options)


class CommitsTrials(MemoryStore):
    """Takes a trial for a commit."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        await super().commit(checkpoints, **{**options, "trial": False})


class TakesOverAtOnce(MemoryStore):
    """Does not wait for a commit in flight."""

    async def take_over_from_self(self, worker_id: Any, grants: Sequence[Grant]) -> Sequence[Grant]:
        return [self._grant(self.database.headers[grant.interval_id], worker_id) for grant in grants]


class FreesTooEarly(MemoryStore):
    """Frees segments that the first consumer has read."""

    async def turn_rings(self, *, epoch_s: float, epoch_bytes: int) -> int:
        freed = self.database.segments.free(lambda stored: True)
        return freed + await super().turn_rings(epoch_s=epoch_s, epoch_bytes=epoch_bytes)


class ForgetsDeltas(MemoryStore):
    """Loads folded rows only."""

    async def load_state(self, grant: Grant, keys: Sequence[bytes]) -> Sequence[Entries]:
        header = self.database.headers[grant.interval_id]
        bundle, header.folded_bundle = header.folded_bundle, header.bundle
        try:
            return await super().load_state(grant, keys)
        finally:
            header.folded_bundle = bundle


class Fails(MemoryStore):
    """Breaks no promise but that it works."""

    async def commit(self, checkpoints: Sequence[Checkpoint], **options: Any) -> None:
        raise StoreUnavailableError("away")


CANARIES: list[tuple[type[MemoryStore], str, str, dict[str, Any]]] = [
    (IgnoresSequencer, "test_stale_sequencer_cannot_commit", "DID NOT RAISE StaleSequencerError", {}),
    (CommitsTwice, "test_bundle_cannot_commit_twice", "DID NOT RAISE OwnershipError", {}),
    (ReadsHeadsLater, "test_head_watermark_belongs_to_the_position_polled", "assert polled.head_seq == last", {}),
    (CommitsInParts, "test_turn_that_fails_late_commits_nothing", "assert polled.segments == ()", {}),
    (CommitsTrials, "test_trial_reports_what_is_refused_and_changes_nothing", "trial=True) StaleSequencerError", {}),
    (
        TakesOverAtOnce,
        "test_taking_over_from_oneself_waits_for_a_commit_in_flight",
        "await asyncio.gather(commit, takeover) StaleSequencerError",
        {},
    ),
    (
        FreesTooEarly,
        "test_retention_never_frees_what_a_cursor_still_needs",
        "assert [s.seq for s in polled.segments]",
        {},
    ),
    (
        ForgetsDeltas,
        "test_folded_and_unfolded_reads_are_equal",
        'assert await state_of(owner, world, "a", "b"',
        {"folds_after": (1,)},
    ),
]
"""What is broken, the claim that catches it, where in it and by what it is caught, and the claim's arguments."""

canaries = pytest.mark.parametrize(
    ("broken", "claim", "finding", "arguments"), CANARIES, ids=lambda v: getattr(v, "__name__", "")
)


async def finding_of(store: type[MemoryStore], claim: str, arguments: dict[str, Any]) -> str:
    """Return the test of the suite that fails and its error; empty if none fails."""
    check = getattr(StoreSuite(), claim)
    async with closing(MemorySubject(store)) as subject:
        world = await a_world(subject)
        try:
            await check(world, **arguments)
        except (AssertionError, MillError, pytest.fail.Exception) as error:
            frames = traceback.extract_tb(error.__traceback__)
            line = next(frame.line for frame in reversed(frames) if frame.filename.endswith("_suite.py"))
            return f"{line} {type(error).__name__}: {error}"
    return ""


@canaries
async def test_broken_store_is_caught_by_the_tests_of_what_it_breaks(
    broken: type[MemoryStore], claim: str, finding: str, arguments: dict[str, Any]
) -> None:
    assert await finding_of(MemoryStore, claim, arguments) == ""

    assert finding in await finding_of(broken, claim, arguments)


@canaries
async def test_failing_store_is_not_mistaken_for_the_broken_one(
    broken: type[MemoryStore], claim: str, finding: str, arguments: dict[str, Any]
) -> None:
    if broken is TakesOverAtOnce:
        return  # its claim waits for a commit in flight, and this store has none
    found = await finding_of(Fails, claim, arguments)

    assert found.endswith("StoreUnavailableError: away")
    assert finding not in found

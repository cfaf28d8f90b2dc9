"""Balance decides on one snapshot; repeated by every worker it ends in fair shares and then moves nothing."""

import random
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.runtime.balance import moves
from millpy.store.protocol import IntervalOwner, LiveWorker, Ownership

A, B, C, D = UUID(int=1), UUID(int=2), UUID(int=3), UUID(int=4)


def snapshot(
    owners: dict[int, UUID | None], *workers: UUID, only: dict[UUID, tuple[str, ...]] | None = None
) -> Ownership:
    only = only or {}
    return Ownership(
        tuple(LiveWorker(worker, only.get(worker, ())) for worker in workers),
        tuple(IntervalOwner(interval, owner, owner in workers) for interval, owner in owners.items()),
        1,
    )


def test_a_worker_alone_claims_everything() -> None:
    decided = moves(A, snapshot({1: None, 2: None, 3: None}, A), {"c": [1, 2, 3]}, frozenset())

    assert decided.to_claim == (1, 2, 3)


def test_intervals_of_a_dead_worker_are_claimed() -> None:
    decided = moves(A, snapshot({1: B, 2: A}, A), {"c": [1, 2]}, frozenset({2}))

    assert decided.to_claim == (1,)


def test_a_claim_whose_answer_was_lost_is_claimed_again() -> None:
    decided = moves(A, snapshot({1: A, 2: A}, A), {"c": [1, 2]}, frozenset({2}))

    assert decided.to_claim == (1,)


def test_worker_that_holds_none_of_its_intervals_releases_none() -> None:
    """The answers to its claims were lost; meanwhile two workers joined, and one of them has no interval."""
    decided = moves(A, snapshot({1: A, 2: A, 3: B, 4: B}, A, B, C), {"c": [1, 2, 3, 4]}, frozenset())

    assert decided.to_claim == (1, 2)
    assert decided.to_release == ()


def test_a_worker_of_some_computations_claims_its_share_of_these_only() -> None:
    found = snapshot({1: None, 2: None, 3: None}, A, B, only={A: ("c",), B: ("c", "d")})

    assert moves(A, found, {"c": [1, 2], "d": [3]}, frozenset()).to_claim == (1,)
    assert moves(B, found, {"c": [1, 2], "d": [3]}, frozenset()).to_claim == (1, 3)


def test_a_worker_with_a_part_of_its_share_claims_only_the_rest() -> None:
    decided = moves(A, snapshot({1: A, 2: None, 3: None, 4: None}, A, B), {"c": [1, 2, 3, 4]}, frozenset({1}))

    assert decided.to_claim == (2,)


def test_an_interval_that_is_held_counts_although_the_table_names_another_owner() -> None:
    decided = moves(A, snapshot({1: B, 2: None}, A, B), {"c": [1, 2]}, frozenset({1}))

    assert decided.to_claim == ()


@settings(max_examples=1000, deadline=None)
@given(
    owners=st.lists(st.sampled_from([None, A, B, C, D]), max_size=9),
    live=st.sets(st.sampled_from([A, B, C])),
    held=st.sets(st.integers(0, 8)),
    only=st.sets(st.sampled_from([A, B, C])),
)
def test_only_free_intervals_are_claimed_and_only_held_ones_released(
    owners: list[UUID | None], live: set[UUID], held: set[int], only: set[UUID]
) -> None:
    """Answers get lost, leases run out, workers join and leave between the snapshot and what a worker remembers."""
    half = len(owners) // 2
    computations = {"c": range(half), "d": range(half, len(owners))}
    ownership = snapshot(dict(enumerate(owners)), *sorted(live), only=dict.fromkeys(only, ("d",)))

    decided = moves(A, ownership, computations, frozenset(held))

    assert set(decided.to_release) <= held
    assert all(owners[i] == A or owners[i] not in live for i in decided.to_claim)
    assert not set(decided.to_claim) & set(decided.to_release)
    assert not set(decided.to_claim) & held
    assert len(set(decided.to_claim)) == len(decided.to_claim)


def test_surplus_goes_to_a_worker_that_joins() -> None:
    decided = moves(A, snapshot({1: A, 2: A, 3: A, 4: A}, A, B), {"c": [1, 2, 3, 4]}, frozenset({1, 2, 3, 4}))

    assert len(decided.to_release) == 2


def test_a_worker_restricted_to_other_computations_is_not_counted() -> None:
    owners = dict.fromkeys((1, 2, 3, 4), A)
    decided = moves(A, snapshot(owners, A, B, only={B: ("d",)}), {"c": [1, 2, 3, 4]}, frozenset({1, 2, 3, 4}))

    assert decided.to_release == ()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32))
def test_balancing_reaches_fair_shares_and_then_moves_nothing(intervals: int, workers: int, seed: int) -> None:
    rng = random.Random(seed)
    names = [UUID(int=n + 1) for n in range(workers)]
    computations = {"c": list(range(intervals))}
    owners: dict[int, UUID | None] = {i: rng.choice([None, *names]) for i in range(intervals)}

    moved = 0
    for _ in range(200):
        worker = rng.choice(names)
        held = frozenset(i for i, owner in owners.items() if owner == worker)
        decided = moves(worker, snapshot(owners, *names), computations, held)
        for interval in decided.to_claim:
            owners[interval] = worker
        for interval in decided.to_release:
            owners[interval] = None
    for worker in names:
        held = frozenset(i for i, owner in owners.items() if owner == worker)
        decided = moves(worker, snapshot(owners, *names), computations, held)
        moved += len(decided.to_claim) + len(decided.to_release)

    shares = [sum(1 for owner in owners.values() if owner == worker) for worker in names]
    assert sum(shares) == intervals
    assert max(shares) - min(shares) <= 1
    assert moved == 0

"""Ids as two columns: order and bytes, also of ids that share their upper bits, as hashes never do."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millpy.model.ids import FAN_OUT, IdFilter, first_of_each, halves_of, ids_of, order_of, tiers_to_merge

FEW = st.sampled_from([0, 1, 2, 2**40, 2**63, 2**64 - 2, 2**64 - 1])
HALF = st.one_of(FEW, st.integers(0, 2**64 - 1))
IDS = st.lists(st.tuples(HALF, HALF).map(lambda pair: (pair[0] << 64 | pair[1]).to_bytes(16, "big")), max_size=60)


@given(IDS)
def test_ids_are_ordered_by_bytes_and_equal_ids_by_position(ids: list[bytes]) -> None:
    hi, lo = halves_of(b"".join(ids))

    order = order_of(hi, lo).tolist()

    assert order == sorted(range(len(ids)), key=lambda row: (ids[row], row))
    in_order = [ids[row] for row in order]
    assert ids_of(hi[order], lo[order]) == b"".join(in_order)
    assert first_of_each(hi[order], lo[order]).tolist() == [
        row == 0 or in_order[row] != in_order[row - 1] for row in range(len(ids))
    ]


@given(st.lists(st.lists(HALF, max_size=80), max_size=40), st.data())
def test_filter_finds_every_id_of_a_tier(batches: list[list[int]], data: st.DataObject) -> None:
    ids, tiers = IdFilter(ids_min=16), []

    for batch in batches:
        tiers.append(np.array(sorted(batch), np.uint64))
        if data.draw(st.booleans(), "the oldest expires"):
            tiers.pop(0)
        ids.add(np.array(sorted(batch), np.uint64), tiers)

        assert all(ids.may_hold(tier).all() for tier in tiers)


def test_filter_rules_out_most_unknown_ids() -> None:
    rng = np.random.default_rng(3)
    ids, tiers = IdFilter(), []
    for _ in range(200):
        tiers.append(np.sort(rng.integers(0, 2**64, 1_000, np.uint64)))
        ids.add(tiers[-1], tiers)

    unknown = np.sort(rng.integers(0, 2**64, 100_000, np.uint64))

    assert np.count_nonzero(ids.may_hold(unknown)) < len(unknown) / 14


@given(st.lists(st.integers(1, 100_000), max_size=400))
def test_tiers_stay_few(sizes: list[int]) -> None:
    tiers: list[int] = []

    for size in sizes:
        tiers.append(size)
        while count := tiers_to_merge(tiers):
            tiers[-count:] = [sum(tiers[-count:])]

    assert sum(tiers) == sum(sizes)
    assert len(tiers) <= (FAN_OUT - 1) * 9

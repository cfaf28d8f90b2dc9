"""Ids as two columns: order and bytes, also of ids that share their upper bits, as hashes never do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millpy.model.ids import first_of_each, halves_of, ids_of, order_of

FEW = st.sampled_from([0, 1, 2, 2**40, 2**63, 2**64 - 2, 2**64 - 1])
HALF = st.one_of(FEW, st.integers(0, 2**64 - 1))
IDS = st.lists(st.tuples(HALF, HALF).map(lambda pair: (pair[0] << 64 | pair[1]).to_bytes(16, "big")), max_size=60)


@given(IDS)
def test_order_is_that_of_the_bytes_and_within_one_id_the_order_given(ids: list[bytes]) -> None:
    hi, lo = halves_of(b"".join(ids))

    order = order_of(hi, lo).tolist()

    assert order == sorted(range(len(ids)), key=lambda row: (ids[row], row))
    in_order = [ids[row] for row in order]
    assert ids_of(hi[order], lo[order]) == b"".join(in_order)
    assert first_of_each(hi[order], lo[order]).tolist() == [
        row == 0 or in_order[row] != in_order[row - 1] for row in range(len(ids))
    ]

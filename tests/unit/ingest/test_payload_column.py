"""Payloads in larger pieces of bytes are a list of payloads, however they are cut and joined."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.ingest.decode import Decoder
from millpy.ingest.payload_column import GAP_BYTES_MAX, PayloadColumn, PayloadPiece
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import SMALL_RECORDS_MAX, RecordType
from millpy.model.time import Instant

payloads = st.lists(st.binary(max_size=6), max_size=8)
gaps = st.sampled_from([b"-", b"\n\n", b"-" * GAP_BYTES_MAX, b"\n" * (GAP_BYTES_MAX + 1)])


def a_piece(contents: Sequence[bytes], between: Sequence[bytes]) -> PayloadPiece:
    data, begins, ends = b"head", [], []
    for content, gap in zip(contents, between, strict=True):
        begins.append(len(data))
        ends.append(len(data) + len(content))
        data += content + gap
    return PayloadPiece(data, np.array(begins, np.int64), np.array(ends, np.int64))


@settings(deadline=None)
@given(st.lists(payloads, max_size=4), st.data())
def test_column_is_the_list_of_its_payloads(pieces: Sequence[Sequence[bytes]], data: st.DataObject) -> None:
    column = PayloadColumn.joined([
        PayloadColumn([a_piece(piece, data.draw(st.lists(gaps, min_size=len(piece), max_size=len(piece))))])
        for piece in pieces
    ])  # fmt: skip
    expected = [payload for piece in pieces for payload in piece]
    begin, end = data.draw(st.integers(0, 35)), data.draw(st.integers(0, 35))

    for found, same in ((column, expected), (column[begin:end], expected[begin:end])):
        assert list(found) == same
        assert len(found) == len(same)
        assert bool(found) == bool(same)
        assert [found[row] for row in range(-len(same), len(same))] == [*same, *same]
        assert found.sizes().tolist() == list(map(len, same))
        assert found.lines() == b"\n".join(same)


class Reading(msgspec.Struct):
    n: int


lines = st.sampled_from([b'{"n":1}', b'{"n": 2}', b'{"n":1}\n', b"", b"x", b'{"n":1}{"n":1}', b'{"m":1}' + b" " * 99])


@settings(deadline=None)
@given(st.lists(lines, max_size=4), st.integers(SMALL_RECORDS_MAX, SMALL_RECORDS_MAX + 5), gaps)
def test_column_decodes_as_its_payloads_do(odd: Sequence[bytes], many: int, gap: bytes) -> None:
    payloads = [b'{"n":%d}' % number for number in range(many)] + list(odd)
    column = PayloadColumn([a_piece(payloads, [gap] * len(payloads))])
    decoder = Decoder(RecordType(Reading), record_bytes_max=100)

    by_list, by_column = (decoder.decode(SourceBatch("json", Instant(0), payloads=all)) for all in (payloads, column))

    assert by_column.rows.tolist() == by_list.rows.tolist()
    assert by_column.refused == by_list.refused
    assert by_column.batch == by_list.batch
    assert by_column.objects == by_list.objects
    assert [by_column.payload(row) for row in range(len(payloads))] == payloads


@settings(deadline=None)
@given(payloads.filter(len), st.data())
def test_compact_piece_has_the_same_payloads_and_nothing_between(
    contents: Sequence[bytes], data: st.DataObject
) -> None:
    piece = a_piece(contents, data.draw(st.lists(gaps, min_size=len(contents), max_size=len(contents)))).compact()

    assert piece.cut() == contents
    assert piece.data == piece.lines() == b"\n".join(contents)
    assert piece[1:].cut() == contents[1:]


def test_row_beyond_the_end_is_an_error() -> None:
    column = PayloadColumn([a_piece([b"a"], [b"-"])])

    for row in (1, -2):
        with pytest.raises(IndexError):
            column[row]

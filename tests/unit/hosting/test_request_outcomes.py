"""Each request to replay has one outcome, and what belongs to none stays what it is."""

from __future__ import annotations

from millpy.hosting.replay import ReplayBatch, match_outcomes
from millpy.model.checkpoint import DeadLetter, LateRows, Request, RequestOutcome

PAYLOAD, AT = b'{"value":1}', 100


def of_request(number: int, table: str = "late_records", payload: bytes = PAYLOAD) -> Request:
    return Request(table, number, 1, "readings", "sums", payload)  # type: ignore[arg-type]


def batch(*requests: Request) -> ReplayBatch:
    return ReplayBatch(taken=[(request, (0, AT, request.payload, False)) for request in requests])


def late(*windows: int | None, payload: bytes = PAYLOAD, watermark: int = 500) -> LateRows:
    count = len(windows)
    return LateRows(
        "readings", "sums", [b"a"] * count, [payload] * count, [AT] * count, [watermark] * count, [*windows],
        [None] * count,
    )  # fmt: skip


def test_a_record_that_is_late_again_has_one_outcome_however_many_windows_it_missed() -> None:
    again, done = of_request(1), of_request(2, payload=b"{}")

    outcomes, letters, rest = match_outcomes(batch(again, done), [], [late(0, 60)])

    assert outcomes == [RequestOutcome(again, watermark=500), RequestOutcome(done)]
    assert (letters, rest) == ([], [])


def test_of_equal_records_each_takes_the_rows_of_one() -> None:
    first, second = of_request(1), of_request(2)

    outcomes, _, rest = match_outcomes(batch(first, second), [], [late(0, 0, 0)])

    assert outcomes == [RequestOutcome(first, watermark=500), RequestOutcome(second, watermark=500)]
    assert [rows.window_starts for rows in rest] == [[0]], "the third is that of a record that came meanwhile"


def test_a_dead_letter_that_is_late_is_done_and_its_row_stays() -> None:
    dead, other = of_request(1, "dead_letters"), of_request(2)

    outcomes, _, rest = match_outcomes(batch(dead), [], [late(0)])
    assert outcomes == [RequestOutcome(dead)]
    assert [rows.window_starts for rows in rest] == [[0]]

    outcomes, _, rest = match_outcomes(batch(dead, other), [], [late(0)])
    assert outcomes == [RequestOutcome(other, watermark=500), RequestOutcome(dead)]
    assert rest == []


def test_a_dead_letter_is_matched_with_a_request_of_one() -> None:
    letter = DeadLetter("raised", "ValueError", PAYLOAD, "readings", "sums", event_time=AT)
    dead, other = of_request(1, "dead_letters"), of_request(2)

    outcomes, letters, _ = match_outcomes(batch(other, dead), [letter, letter])

    assert outcomes == [RequestOutcome(dead, dead_letter=letter), RequestOutcome(other)]
    assert letters == [letter]

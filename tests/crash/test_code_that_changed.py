"""Code of a Combiner that changed under stored windows, and fails when they close: nobody stops for it."""

from __future__ import annotations

import json

import msgspec

from millpy import Combiner, Count, EventTime, FixedWindows, Graph, SessionWindows, SlidingWindows, seconds
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from tests.crash.graph_files import rows
from tests.crash.test_versions import fed
from tests.feed import Feed

LIMITS = Limits(progress_every_s=0.02, fold_every_s=0.1, lease_ttl_s=1)
WINDOWS = {
    "fixed": FixedWindows(seconds(60)),
    "sliding": SlidingWindows(seconds(60), every=seconds(40)),
    "sessions": SessionWindows(seconds(40)),
}


class Reading(msgspec.Struct):
    device: str
    at: int
    value: int


class Own(Combiner[list[int]]):
    accumulator = list[int]
    result_type = int

    def create(self) -> list[int]:
        return []

    def add(self, accumulator: list[int], record: Reading) -> list[int]:
        return [*accumulator, record.value]

    def merge(self, one: list[int], other: list[int]) -> list[int]:
        return one + other

    def result(self, accumulator: list[int]) -> int:
        return sum(accumulator)


class Fails(Own):
    def result(self, accumulator: list[int]) -> int:
        return sum(accumulator) // (0 if 13 in accumulator else 1)


class FailsAlone(Own):
    def result(self, accumulator: list[int]) -> int:
        return sum(accumulator) // (0 if accumulator == [13] else 1)


Fails.__name__ = FailsAlone.__name__ = "Own"


def graph_of(feed: Feed, own: Own) -> Graph:
    graph = Graph("factory")
    event_time = EventTime("at", unit="s", max_disorder=seconds(0))
    source = graph.inject("readings", feed, schema=Reading, event_time=event_time)
    for name, windows in WINDOWS.items():
        source.key_by("device").window(windows).aggregate(n=Count(), own=own).to_table(name)
    late = source.key_by("device").window(SessionWindows(seconds(40)), allowed_lateness=seconds(60))
    late.aggregate(n=Count(), own=own).to_table("late_sessions")
    return graph


def reading(device: str, at: int, value: int) -> bytes:
    return msgspec.json.encode(Reading(device, at, value))


async def test_result_that_fails_for_a_stored_window_rejects_only_that_window(database_url: str) -> None:
    feed = Feed()
    feed.push(reading("good", 1, 1), reading("bad", 2, 13), reading("good", 3, 2))
    await fed(database_url, graph_of(feed, Own()), feed)
    feed.push(reading("good", 500, 7))
    feed.end()

    await run_worker(graph_of(feed, Fails()), database_url, limits=LIMITS)

    for name in WINDOWS:
        found = rows(database_url, f"SELECT DISTINCT device, n, own FROM factory.{name} ORDER BY 1, 2")
        assert found == [("good", 1, 7), ("good", 2, 3)], name
    dead_letters = rows(
        database_url, "SELECT computation, reason, detail, convert_from(payload, 'UTF8') FROM mill.dead_letters"
    )
    assert {dead_letter[0] for dead_letter in dead_letters} == {*WINDOWS, "late_sessions"}
    assert {dead_letter[1:3] for dead_letter in dead_letters} == {
        ("user_error", "ZeroDivisionError: integer division or modulo by zero")
    }
    assert all(
        json.loads(dead_letter[3])["key"] == "bad" and 13 in json.loads(dead_letter[3])["values"][1]
        for dead_letter in dead_letters
    )
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []


async def test_session_that_grows_deletes_its_row_even_if_its_result_fails(database_url: str) -> None:
    feed = Feed()
    feed.push(reading("bad", 2, 13), reading("good", 45, 1))
    await fed(database_url, graph_of(feed, Own()), feed)
    assert rows(database_url, "SELECT device, n, own FROM factory.late_sessions") == [("bad", 1, 13)]
    feed.push(reading("bad", 30, 1), reading("good", 500, 7))
    feed.end()

    await run_worker(graph_of(feed, FailsAlone()), database_url, limits=LIMITS)

    found = rows(database_url, "SELECT device, n, own FROM factory.late_sessions ORDER BY 1, 3")
    assert found == [("bad", 2, 14), ("good", 1, 1), ("good", 1, 7)]
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []

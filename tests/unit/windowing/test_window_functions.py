"""A user's window functions: refusals, errors that become dead letters, identity, bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import pytest

from millpy import (
    Accumulation,
    AfterCount,
    AfterWatermark,
    Count,
    EventTime,
    FixedWindows,
    Graph,
    Repeatedly,
    SessionWindows,
    WindowFunction,
    hours,
    minutes,
    seconds,
)
from millpy.cli.auditor import _reach
from millpy.errors import GraphError, SchemaError
from millpy.graph.loader import load_graph
from millpy.graph.streams import KeyedStream
from millpy.limits import Limits
from millpy.model.code_identity import code_digest
from millpy.model.identity_text import identity_text
from millpy.model.record import RecordType
from millpy.spark.native import native_plans
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window_memory import PANE_BYTES, SESSION_BYTES
from tests.feed import Feed
from tests.stage_driver import StageDriver

S = 1_000_000
Window = tuple[datetime, datetime]


class Visit(msgspec.Struct):
    key: str
    at: datetime | None = None
    seconds: float = 1.0


class Lasting(WindowFunction):
    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(at, at + timedelta(seconds=record.seconds))]


class Merging(Lasting):
    merges = True


def keyed() -> KeyedStream:
    stream = Graph("site").inject("visits", Feed(), schema=Visit, event_time=EventTime("at", max_disorder=hours(1)))
    return stream.key_by("key")


def joined_within(windows: Any) -> object:
    one = keyed()
    return one.join(one.stream.key_by("key"), within=windows)


def subject(function: WindowFunction, limits: Limits | None = None) -> StageDriver:
    logic = WindowedLogic(function, timedelta(0), {"n": Count()})
    outputs = {"panes": logic.output_type(RecordType(Visit), ("key",))}
    return StageDriver(logic, Visit, outputs=outputs, tables={"panes": 1}, max_disorder=100 * S, limits=limits)


def a_function(**attributes: Any) -> WindowFunction:
    kind: type[WindowFunction] = type("Changed", (Lasting,), attributes)
    return kind()


class Empty(WindowFunction):
    pass


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "no windows": (lambda: keyed().window(minutes(1)), "FixedWindows(minutes(1))"),  # type: ignore[arg-type]
    "a class": (lambda: keyed().window(Lasting), "an instance"),  # type: ignore[arg-type]
    "no assign": (lambda: keyed().window(Empty()), "def assign(self, record, at, key)"),
    "a length of zero": (lambda: keyed().window(a_function(length_max=seconds(0))), "length_max = hours(12)"),
    "a length in seconds": (lambda: keyed().window(a_function(length_max=60)), "length_max = hours(12)"),
    "too many windows": (lambda: keyed().window(a_function(windows_max=1_001)), "windows_max = 10"),
    "no windows at all": (lambda: keyed().window(a_function(windows_max=0)), "windows_max = 10"),
    "merges that is a word": (lambda: keyed().window(a_function(merges="yes")), "merges = True"),
    "a merge that is never called": (
        lambda: keyed().window(a_function(merge=lambda self, window, others: [])),
        "merges = True",
    ),
    "a trigger that closes windows that merge": (
        lambda: keyed().window(Merging(), trigger=AfterCount(1)),
        "Repeatedly(AfterCount(1))",
    ),
    "retractions into windows that merge": (
        lambda: (
            keyed()
            .window(FixedWindows(minutes(1)), allowed_lateness=minutes(1), accumulation=Accumulation.RETRACTING)
            .aggregate(n=Count())
            .key_by("key")
            .window(Merging())
        ),
        "Accumulation.DISCARDING",
    ),
    "a join": (lambda: joined_within(Lasting()), "an interval"),
    "a length shorter than the gap": (
        lambda: SessionWindows(minutes(1), by_key={"a": minutes(9)}, max_length=minutes(5)),
        "a longer max_length",
    ),
    "a length of zero of sessions": (lambda: SessionWindows(minutes(1), max_length=seconds(0)), "max_length=hours"),
    "no records": (lambda: SessionWindows(minutes(1), max_records=0), "max_records=10_000"),
    "half a record": (lambda: SessionWindows(minutes(1), max_records=1.5), "max_records=10_000"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("make", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_with_a_hint(make: Callable[[], object], hint: str) -> None:
    with pytest.raises((GraphError, SchemaError)) as refused:
        make()

    assert hint in refused.value.hint


def test_triggers_that_go_on_and_retractions_into_windows_that_do_not_merge_are_taken() -> None:
    keyed().window(Merging(), trigger=Repeatedly(AfterCount(1))).aggregate(n=Count())
    keyed().window(Lasting(), trigger=AfterCount(1)).aggregate(n=Count())
    hourly = keyed().window(FixedWindows(minutes(1)), allowed_lateness=minutes(1), accumulation=Accumulation.RETRACTING)
    hourly.aggregate(n=Count(), seconds=Count()).key_by("key").window(
        Lasting(), trigger=AfterWatermark(early=AfterCount(1))
    ).aggregate(n=Count())


@dataclass(frozen=True)
class Parametrised(WindowFunction):
    size_s: int
    stored_as = "size"

    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        """Say nothing of interest."""
        return [(at, at + timedelta(seconds=self.size_s))]


class Commented(WindowFunction):
    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        # another text of the same code
        return [
            (at, at + timedelta(seconds=record.seconds)),
        ]


class Changed(WindowFunction):
    def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
        return [(at, at + timedelta(minutes=record.seconds))]


def test_the_identity_is_name_parameters_bounds_and_code() -> None:
    identity = Parametrised(5).identity()

    assert identity["name"] == "size"
    assert identity["parameters"] == {"size_s": 5}
    assert identity != Parametrised(6).identity()
    assert identity == Parametrised(5).identity()
    assert repr(Parametrised(5)) == "Parametrised(size_s=5)"
    bounds = "length_max=hours(24), merges=False, windows_max=100"
    assert identity_text(identity) == f"size(size_s=5) with {bounds}, of code {identity['code']}"
    assert code_digest(Commented, WindowFunction) == code_digest(Lasting, WindowFunction)
    assert code_digest(Changed, WindowFunction) != code_digest(Lasting, WindowFunction)
    assert Merging().identity()["code"] == Lasting().identity()["code"], "the code is inherited"
    assert a_function(length_max=hours(2)).identity() != a_function().identity()
    for one, other in ((3, 4), ({"a", "b"}, {"a", "c"}), (ZoneInfo("Europe/Berlin"), ZoneInfo("Europe/Paris"))):
        assert a_function(gap=one).identity() != a_function(gap=other).identity()
    assert a_function(gap=object()).identity() == a_function(gap=object()).identity()
    behind: list[type] = [type("Mixin", (), {"gap": gap}) for gap in (3, 4)]
    assert len({code_digest(type("F", (Lasting, mixin), {}), WindowFunction) for mixin in behind}) == 2
    assert a_function(stored_as="Lasting").identity() == Lasting().identity()
    assert msgspec.json.decode(msgspec.json.encode(identity)) == identity


def test_code_without_a_source_has_an_identity_too() -> None:
    text = "class F(Base):\n    def assign(self, record, at, key):\n        return [(at, at + {})]\n"
    found = []
    for step in ("step", "step", "step * 2"):
        names: dict[str, Any] = {"Base": WindowFunction, "step": seconds(1)}
        exec(compile(text.format(step), "<string>", "exec"), names)
        found.append(code_digest(names["F"], WindowFunction))

    assert found[0] == found[1] != found[2]


def test_a_process_describes_the_code_that_it_has_loaded_not_that_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "site.py"
    imports = "import msgspec\nfrom millpy import *\n"
    text = """
class Visit(msgspec.Struct):
    key: str
    at: int

class Own(WindowFunction):
    def assign(self, record, at, key):
        return [(at, at + seconds(1))]

graph = Graph("site")
visits = graph.inject("visits", File("in"), schema=Visit, event_time=EventTime("at", unit="s", max_disorder=hours(1)))
visits.key_by("key").window(Own()).aggregate(n=Count()).to_table("own")
"""
    file.write_text(imports + text)
    graph = load_graph(str(file))
    file.write_text(imports + "\n\n" + text.replace("seconds(1)", "seconds(20)"))
    described = graph.spec()
    changed = load_graph(str(file)).spec()
    file.write_text("")

    assert graph.spec() == described
    assert described != changed
    file.write_text(imports + text)
    assert load_graph(str(file)).spec() == described


def test_errors_of_the_function_name_what_is_wrong() -> None:
    stage = subject(Lasting())
    result = stage.feed([(Visit("a", None, seconds), 1_000 * S) for seconds in (1, 0, -1, 86_400, 86_401, 1e300)])

    details = [letter.detail for letter in result.dead_letters]
    assert len(details) == 4
    assert "does not contain its event time 1970-01-01T00:16:40+00:00" in details[0]
    assert "longer than length_max=hours(24)" in details[2]
    assert details[3].startswith("OverflowError")
    assert result.dead_lettered_by_input == {0: 4}


def test_windows_do_not_merge_beyond_the_longest_and_no_record_is_lost() -> None:
    stage = subject(a_function(merges=True, length_max=seconds(10)))
    stage.feed([(Visit("a", None, 4), at * S) for at in (0, 3, 6, 9, 20)])
    stage.restart()
    result = stage.feed([(Visit("a", None, 4), 8 * S), (Visit("a", None, 1), 9 * S)])
    stage.finish()

    assert not result.dead_letters
    assert [(pane.window_start.second, pane.window_end.second, pane.n) for pane, _ in stage.produced("panes")] == [
        (0, 10, 4),
        (8, 13, 2),
        (20, 24, 1),
    ]


def test_a_record_for_which_merge_fails_is_a_dead_letter_and_the_others_merge() -> None:
    def merge(self: WindowFunction, window: Window, others: Iterable[Window]) -> Iterable[Window]:
        if window[0].second == 2:
            raise KeyError("two")
        return [(window[0], window[0])] if window[0].second == 3 else others

    stage = subject(a_function(merges=True, merge=merge))
    result = stage.feed([(Visit("a", None, 4), at * S) for at in (0, 1, 2, 3, 4)])
    stage.finish()

    assert [letter.reason for letter in result.dead_letters] == ["user_error", "refused"]
    assert "which is no other window" in result.dead_letters[1].detail
    assert [pane.n for pane, _ in stage.produced("panes")] == [3]


@pytest.mark.parametrize("function", [Lasting(), Merging()], ids=["", "merging"])
def test_windows_beyond_the_room_are_dead_letters_and_those_of_open_keys_count(function: WindowFunction) -> None:
    each = PANE_BYTES + SESSION_BYTES + 100
    stage = subject(function, Limits(open_windows_bytes_max=each * 40))
    stage.feed([(Visit(f"key {number}"), 0) for number in range(20)])
    result = stage.feed([(Visit(f"key {number}"), 0) for number in range(60)], columns=True)

    assert len(result.dead_letters) == 30
    assert {letter.reason for letter in result.dead_letters} == {"windows"}
    stage.restart()
    assert not stage.feed([(Visit("key 0"), 0)]).dead_letters


def test_the_function_gets_a_copy_of_the_record_and_does_not_run_on_the_event_loop() -> None:
    class Changing(WindowFunction):
        def assign(self, record: Any, at: datetime, key: Any) -> Iterable[Window]:
            record.key, record.seconds = "b", 7
            return [(at, at + timedelta(seconds=1))]

    stage = subject(Changing())
    visit = Visit("a")
    stage.feed([(visit, 0)])
    stage.finish()

    assert visit == Visit("a")
    assert [pane.key for pane, _ in stage.produced("panes")] == ["a"]
    assert not stage.interval.immediate


def test_audits_know_how_far_the_windows_reach_and_that_spark_has_none() -> None:
    keyed_stream = keyed()
    keyed_stream.window(Lasting()).aggregate(n=Count()).to_table("own")
    spec = keyed_stream.stream.graph.spec()

    assert _reach(spec, spec.tables[0]) == 24 * 3_600 * S
    plans, refused = native_plans(spec)
    assert not plans
    assert refused == {"own": "its windows are a function of yours, which Spark's own windows cannot call"}

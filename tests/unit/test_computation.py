"""Computations: cells, timers, productions, and what becomes of records that user code cannot take."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from millpy.computation import Computation, Context, ListCell, MapCell, Value
from millpy.errors import SchemaError, TimerError
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.time import INSTANT_MAX
from millpy.model.timer import Timer
from millpy.operators.keyed import ComputationLogic
from tests.stage_driver import StageDriver


class Reading(msgspec.Struct):
    key: str
    value: float = 0.0
    note: str = ""


class Usual(msgspec.Struct):
    count: int = 0
    total: float = 0.0


class Alert(msgspec.Struct):
    key: str
    what: str
    count: int = 0


OUTPUTS = {"alerts": RecordType(Alert)}


def driver(computation: Computation, **settings: Any) -> StageDriver:
    settings.setdefault("outputs", OUTPUTS)
    return StageDriver(ComputationLogic(computation), Reading, **settings)


def texts(subject: StageDriver) -> list[str]:
    return [record.what for record, _ in subject.produced("alerts")]


class Counting(Computation):
    usual = Value(Usual)

    def process_record(self, context: Context, record: Reading) -> None:
        usual = context[Counting.usual]
        usual.count += 1
        usual.total += record.value
        context.produce(Alert(context.key, record.note, usual.count))
        if record.note == "bad":
            context.set_timer("never", at=context.event_time_us + 1)
            raise ValueError("a bad\x00 record")
        if record.note == "reset":
            del context[Counting.usual]


def test_value_changed_in_place_is_kept_and_stored() -> None:
    subject = driver(Counting())

    subject.feed([(Reading("a", 1.0), 1), (Reading("b"), 2), (Reading("a", 2.0), 3)])
    subject.restart()
    subject.feed([(Reading("a", 3.0), 4)])

    assert subject.stored[(Kind.STATE, "usual", b'"a"', "")][0] == b'{"count":3,"total":6.0}'
    assert [(r.key, r.count, at) for r, at in subject.produced("alerts")] == [
        ("a", 1, 1),
        ("b", 1, 2),
        ("a", 2, 3),
        ("a", 3, 4),
    ]


def test_record_that_raises_is_dead_lettered_without_effects() -> None:
    subject = driver(Counting())

    result = subject.feed([(Reading("a", 1.0), 1), (Reading("a", 9.0, "bad"), 2), (Reading("a", 2.0), 3)])

    assert [r.count for r, _ in subject.produced("alerts")] == [1, 2]
    assert subject.stored[(Kind.STATE, "usual", b'"a"', "")][0] == b'{"count":2,"total":3.0}'
    assert subject.interval.next_due() == (INSTANT_MAX, INSTANT_MAX)
    (dead_letter,) = result.dead_letters
    assert (dead_letter.reason, dead_letter.key, dead_letter.event_time, dead_letter.stream) == (
        "user_error",
        b'"a"',
        2,
        "input",
    )
    assert msgspec.json.decode(dead_letter.payload, type=Reading) == Reading("a", 9.0, "bad")
    assert "ValueError" in dead_letter.traceback
    assert "\x00" not in dead_letter.detail + dead_letter.traceback
    assert result.dead_lettered_by_input == {0: 1}


@pytest.mark.parametrize("attempts", [1, 3])
def test_record_is_tried_as_often_as_limits_say(attempts: int) -> None:
    calls = []

    class Failing(Computation):
        def process_record(self, context: Context, record: Reading) -> None:
            calls.append(record.note)
            if record.note == "bad":
                raise RuntimeError

    subject = driver(Failing(), limits=Limits(record_attempts_max=attempts))
    result = subject.feed([(Reading("a", note="bad"), 1), (Reading("a", note="good"), 2)])

    assert calls == ["bad"] * attempts + ["good"]
    assert len(result.dead_letters) == 1


def test_record_that_succeeds_when_tried_again_is_no_dead_letter() -> None:
    calls: list[str] = []

    class Flaky(Counting):
        def process_record(self, context: Context, record: Reading) -> None:
            super().process_record(context, record)
            calls.append(record.note)
            if calls.count("flaky") == 1 and record.note == "flaky":
                raise RuntimeError

    subject = driver(Flaky())
    result = subject.feed([(Reading("a", note="x"), 1), (Reading("a", note="flaky"), 2)])

    assert not result.dead_letters
    assert texts(subject) == ["x", "flaky"]
    assert subject.stored[(Kind.STATE, "usual", b'"a"', "")][0] == b'{"count":2,"total":0.0}'


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_that_cannot_be_stored_dead_letters_only_its_record(value: float) -> None:
    subject = driver(Counting())

    result = subject.feed([(Reading("a", 1.0), 1), (Reading("a", value), 2), (Reading("a", 2.0), 3)])

    assert [dead_letter.reason for dead_letter in result.dead_letters] == ["refused"]
    assert subject.stored[(Kind.STATE, "usual", b'"a"', "")][0] == b'{"count":2,"total":3.0}'


@pytest.mark.parametrize(
    "production",
    [Alert("a", "x", 2**63), Alert("a", "\x00"), Alert("a", 7), Alert("a", "\ud800"), Reading("a"), None],  # type: ignore[arg-type]
)
def test_production_that_cannot_be_encoded_dead_letters_its_record(production: Any) -> None:
    class Producing(Computation):
        def process_record(self, context: Context, record: Reading) -> None:
            context.produce(production if record.note == "bad" else Alert("a", "fine"))

    subject = driver(Producing())
    result = subject.feed([(Reading("a"), 1), (Reading("a", note="bad"), 2), (Reading("a"), 3)])

    assert [dead_letter.reason for dead_letter in result.dead_letters] == ["refused"]
    assert [at for _, at in subject.produced("alerts")] == [1, 3]


def test_cell_set_to_another_type_is_refused_when_set_not_when_read() -> None:
    class Wrong(Computation):
        count = Value(int, default=0)

        def process_record(self, context: Context, record: Reading) -> None:
            context[Wrong.count] = "x" if record.note == "bad" else context[Wrong.count] + 1  # type: ignore[assignment]

    subject = driver(Wrong())
    result = subject.feed([(Reading("a"), 1), (Reading("a", note="bad"), 2), (Reading("a"), 3)])

    assert [dead_letter.reason for dead_letter in result.dead_letters] == ["refused"]
    assert subject.stored[(Kind.STATE, "count", b'"a"', "")][0] == b"2"


class Cells(Computation):
    whole = ListCell(int)
    entries = MapCell(int, str)
    nothing = Value(str)
    seen: list[Any] = []  # noqa: RUF012

    def process_record(self, context: Context, record: Reading) -> None:
        match record.note.split():
            case ["push", number]:
                context[Cells.whole].append(int(number))
            case ["put", name, value]:
                context[Cells.entries][int(name)] = value
            case ["drop", name]:
                del context[Cells.entries][int(name)]
            case ["set"]:
                context[Cells.entries] = {5: "five", 1: "one"}
            case ["clear"]:
                del context[Cells.entries]
                del context[Cells.whole]
            case ["read"]:
                self.seen.append((list(context[Cells.whole]), dict(context[Cells.entries]), context[Cells.nothing]))


def test_lists_and_maps_keep_their_entries() -> None:
    Cells.seen.clear()
    subject = driver(Cells())
    for at, note in enumerate(["push 1", "put 7 x", "put 2 y", "read", "push 2", "drop 7", "read", "set", "read"]):
        subject.feed([(Reading("a", note=note), at)])
        subject.restart()

    assert Cells.seen == [
        ([1], {2: "y", 7: "x"}, None),
        ([1, 2], {2: "y"}, None),
        ([1, 2], {1: "one", 5: "five"}, None),
    ]
    assert subject.stored[(Kind.STATE, "entries", b'"a"', "5")][0] == b'"five"'

    subject.feed([(Reading("a", note="clear"), 20), (Reading("a", note="read"), 21)])

    assert Cells.seen[-1] == ([], {}, None)
    assert not subject.stored


class Timers(Computation):
    log = ListCell(str)

    def process_record(self, context: Context, record: Reading) -> None:
        match record.note.split():
            case ["set", name, at]:
                context.set_timer(name, at=int(at))
            case ["clock", name, at]:
                context.set_timer(name, at=int(at), processing=True)
            case ["delete", name]:
                context.delete_timer(name)
            case ["hold", name, at]:
                context.hold(name, int(at))
            case ["release", name]:
                context.release(name)
            case ["old"]:
                context.produce(Alert("a", "old"), at=context.event_time_us - 1)
            case ["later"]:
                context.produce(Alert("a", "later"), at=context.event_time_us + 5)
        context.produce(Alert(context.key, f"record {record.note} {'late' if context.late else ''}".strip()))

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Alert(context.key, f"timer {timer.name}"))
        if timer.name == "chain" and timer.at_us < 40:
            context.set_timer("chain", at=timer.at_us + 10)
        if timer.name == "again":
            context.set_timer("again", at=timer.at_us)
        if timer.name == "bad":
            raise ValueError


def test_timers_fire_in_due_order_before_the_record_that_moves_the_watermark_past_them() -> None:
    subject = driver(Timers())

    subject.feed(
        [
            (Reading("a", note="set later 20"), 1),
            (Reading("a", note="set b 10"), 2),
            (Reading("a", note="set a 10"), 3),
            (Reading("b", note="x"), 15),
            (Reading("a", note="y"), 16),
        ]
    )

    assert texts(subject) == [
        "record set later 20",
        "record set b 10",
        "record set a 10",
        "record x",
        "timer a",
        "timer b",
        "record y",
    ]
    assert subject.interval.next_due() == (20, INSTANT_MAX)
    assert subject.interval.oldest_work() == 20


def test_timer_waits_for_watermark_and_its_production_has_its_time() -> None:
    subject = driver(Timers(), max_disorder=5)

    subject.feed([(Reading("a", note="set t 10"), 1), (Reading("b"), 14)])
    assert "timer t" not in texts(subject)

    subject.feed([(Reading("b"), 15)])
    assert subject.produced("alerts")[-1] == (Alert("a", "timer t"), 10)
    assert not subject.stored


def test_deleted_timer_never_fires_and_one_set_again_has_moved() -> None:
    subject = driver(Timers())

    subject.feed([(Reading("a", note="set t 10"), 1), (Reading("a", note="set m 10"), 2)])
    subject.feed([(Reading("a", note="delete t"), 3), (Reading("a", note="set m 30"), 4), (Reading("b"), 20)])
    assert [text for text in texts(subject) if text.startswith("timer")] == []

    subject.feed([(Reading("b"), 30)])
    assert [text for text in texts(subject) if text.startswith("timer")] == ["timer m"]


def test_timer_that_sets_a_timer_already_due_fires_that_too() -> None:
    subject = driver(Timers())

    subject.feed([(Reading("a", note="set chain 10"), 1), (Reading("b"), 100)])

    assert [(r.what, at) for r, at in subject.produced("alerts") if r.what.startswith("timer")] == [
        ("timer chain", at) for at in (10, 20, 30, 40)
    ]


def test_timer_that_would_fire_endlessly_is_dead_lettered() -> None:
    subject = driver(Timers())

    result = subject.feed([(Reading("a", note="set again 10"), 1), (Reading("a", note="x"), 100)])

    assert [dead_letter.reason for dead_letter in result.dead_letters] == ["user_error"]
    assert "record x" in texts(subject)
    assert subject.interval.next_due() == (INSTANT_MAX, INSTANT_MAX)


def test_timer_that_raises_is_dropped_and_the_key_continues() -> None:
    subject = driver(Timers())

    result = subject.feed(
        [(Reading("a", note="set bad 10"), 1), (Reading("a", note="set good 11"), 2), (Reading("b"), 9)]
    )
    assert not result.dead_letters
    result = subject.feed([(Reading("b"), 50)])

    assert texts(subject)[-1] == "timer good"
    (dead_letter,) = result.dead_letters
    assert msgspec.json.decode(dead_letter.payload)["timer"] == "bad"
    assert dead_letter.key == b'"a"'
    assert result.dead_lettered_by_input == {}


def test_processing_timer_follows_the_clock_and_holds_the_time_of_its_record() -> None:
    subject = driver(Timers())

    subject.feed([(Reading("a", note="clock p 1000"), 7), (Reading("b"), 50)], now_us=999)
    assert subject.interval.oldest_work() == 7
    assert subject.interval.next_due() == (INSTANT_MAX, 1000)
    subject.restart()

    subject.feed([], now_us=1000)

    assert subject.produced("alerts")[-1] == (Alert("a", "timer p"), 7)
    assert subject.interval.oldest_work() == INSTANT_MAX
    assert not subject.stored


def test_processing_timer_of_a_late_record_holds_nothing() -> None:
    subject = driver(Timers())

    subject.feed([(Reading("b"), 50), (Reading("a", note="clock p 1000"), 7)])

    assert texts(subject)[-1] == "record clock p 1000 late"
    assert subject.interval.oldest_work() == INSTANT_MAX


def test_hold_keeps_the_watermark_back_until_it_is_released() -> None:
    subject = driver(Timers())

    subject.feed([(Reading("a", note="hold h 5"), 1), (Reading("a", note="hold g 9"), 2)])
    assert subject.interval.oldest_work() == 5
    subject.restart()
    subject.feed([(Reading("a", note="release h"), 3)])
    assert subject.interval.oldest_work() == 9
    assert subject.interval.next_due() == (INSTANT_MAX, INSTANT_MAX)


def test_production_may_be_named_later_but_not_older() -> None:
    subject = driver(Timers())

    result = subject.feed([(Reading("a", note="old"), 10), (Reading("a", note="later"), 11)])

    assert subject.produced("alerts") == [(Alert("a", "later"), 16), (Alert("a", "record later"), 11)]
    assert "TimerError" in result.dead_letters[0].traceback


def test_timer_set_and_fired_within_a_bundle_is_not_written() -> None:
    subject = driver(Timers())

    result = subject.feed([(Reading("a", note="set t 5"), 1), (Reading("a"), 10)])

    assert "timer t" in texts(subject)
    assert result.delta == ()


def test_lateness_behind_a_keyed_stage_is_judged_by_the_watermark_before_the_turn() -> None:
    subject = driver(Timers(), source_fed=False)

    subject.feed([(Reading("a", note="x"), 10), (Reading("a", note="y"), 5)], watermark=20)
    subject.feed([(Reading("a", note="z"), 19)], watermark=20)

    assert texts(subject) == ["record x", "record y", "record z late"]


def test_row_watermark_is_capped_by_the_other_producers() -> None:
    subject = driver(Timers())

    subject.feed([(Reading("a", note="set t 10"), 1), (Reading("b"), 50), (Reading("a", note="x"), 20)], cap=15)

    assert texts(subject) == ["record set t 10", "record", "timer t", "record x"]


class Sleepy(Computation):
    usual = Value(Usual)
    inside: set[str] = set()  # noqa: RUF012
    most = 0

    async def process_record(self, context: Context, record: Reading) -> None:
        assert context.key not in self.inside, "two records of one key at once"
        self.inside.add(context.key)
        Sleepy.most = max(self.most, len(self.inside))
        context[Sleepy.usual].count += 1
        await asyncio.sleep(0)
        self.inside.discard(context.key)
        if record.note == "bad":
            raise ValueError
        context.produce(Alert(context.key, record.note, context[Sleepy.usual].count))


async def test_async_callbacks_run_concurrently_across_keys_and_in_order_within_one() -> None:
    subject = driver(Sleepy())
    rows = [(Reading("abc"[n % 3], note="bad" if n == 4 else str(n)), n) for n in range(9)]

    result = subject.feed(rows)

    assert Sleepy.most == 3
    assert texts(subject) == ["0", "1", "2", "3", "5", "6", "7", "8"]
    assert [r.count for r, _ in subject.produced("alerts")] == [1, 1, 1, 2, 2, 3, 2, 3]
    assert len(result.dead_letters) == 1


def test_key_that_cannot_be_stored_is_dead_lettered() -> None:
    subject = driver(Counting())

    result = subject.feed([(Reading("a\x00b"), 1), (Reading("a"), 2)])

    assert [dead_letter.reason for dead_letter in result.dead_letters] == ["key"]
    assert result.dead_lettered_by_input == {0: 1}
    assert [at for _, at in subject.produced("alerts")] == [2]


def test_state_beyond_the_cache_is_evicted_once_folded_and_loaded_again() -> None:
    subject = driver(Counting(), limits=Limits(state_cache_bytes_max=4_000))

    for n in range(300):
        subject.feed([(Reading(f"key-{n % 100}"), n)])
        if n % 10 == 9:
            subject.fold()

    assert subject.interval.missing_keys([]) == []
    values = {value for value, _, _ in subject.stored.values()}
    assert values == {b'{"count":3,"total":0.0}'}
    assert len(subject.stored) == 100


def test_value_that_was_deleted_before_the_cache_was_full_stays_deleted() -> None:
    subject = driver(Counting(), limits=Limits(state_cache_bytes_max=1_000))
    subject.feed([(Reading("a"), 1)])
    subject.fold()

    subject.feed([(Reading("a", note="reset"), 2)])
    subject.feed([(Reading(f"key-{n}"), 3) for n in range(10)])  # state is loaded from rows from here on
    subject.feed([(Reading("a"), 4)])

    assert subject.stored[(Kind.STATE, "usual", b'"a"', "")][0] == b'{"count":1,"total":0.0}'


def test_restart_without_state_loads_keys_on_demand() -> None:
    subject = driver(Counting())
    subject.feed([(Reading("a", 1.0), 1), (Reading("b", 1.0), 1)])

    subject.restart(state_complete=False)
    subject.feed([(Reading("a", 2.0), 2), (Reading("c"), 3)])

    assert subject.stored[(Kind.STATE, "usual", b'"a"', "")][0] == b'{"count":2,"total":3.0}'


def test_table_rows_have_the_fields_and_an_ordinal() -> None:
    subject = driver(Counting(), tables={"alerts": 3})

    result = subject.feed([(Reading("a", note="x"), 1), (Reading("b", note="y"), 2)])

    (rows,) = result.results
    assert rows.table_id == 3
    assert rows.columns == [["a", "b"], ["x", "y"], [1, 1], [1, 2], [0, 1]]


def test_context_gives_times_as_aware_datetimes() -> None:
    seen: list[Any] = []

    class Looking(Computation):
        def process_record(self, context: Context, record: Reading) -> None:
            seen.append((context.event_time, context.now, context.stream, context.input_watermark))
            with pytest.raises(TimerError):
                context.set_timer("naive", at=datetime(2024, 1, 1))  # noqa: DTZ001

    driver(Looking()).feed([(Reading("a"), 1_000_000)], now_us=2_000_000)

    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert seen == [(epoch.replace(second=1), epoch.replace(second=2), "input", datetime.min.replace(tzinfo=UTC))]


def test_cell_of_a_type_without_json_form_is_refused_when_the_graph_is_built() -> None:
    class Odd(Computation):
        odd = Value(complex)

    with pytest.raises(SchemaError, match="odd"):
        ComputationLogic(Odd())


@pytest.mark.parametrize("factory", [time.time, uuid4, lambda: datetime.now(UTC), lambda: [random.random()]])
def test_default_that_differs_each_time_is_refused_when_the_graph_is_built(factory: Callable[[], Any]) -> None:
    first_seen = msgspec.defstruct("FirstSeen", [("at", Any, msgspec.field(default_factory=factory))])

    class Odd(Computation):
        odd = Value(first_seen)

    class Even(Computation):
        even = Value(first_seen, default=first_seen(0))

    with pytest.raises(SchemaError, match="'odd' differs each time"):
        ComputationLogic(Odd())
    assert ComputationLogic(Even()).identity() == ComputationLogic(Even()).identity()


class Named(Computation):
    def process_record(self, context: Context, record: Reading) -> None:
        match record.note:
            case "earlier":
                context.set_timer("t", at=100, event_time=50)
            case "free":
                context.set_timer("t", at=100, hold=False)
            case "before cause":
                context.set_timer("t", at=100, event_time=context.event_time_us - 1)
            case "after fire":
                context.set_timer("t", at=100, event_time=101)

    def process_timer(self, context: Context, timer: Timer) -> None:
        context.produce(Alert(context.key, timer.name))


def test_timer_holds_the_watermark_at_the_event_time_of_what_it_will_produce() -> None:
    subject = driver(Named())

    subject.feed([(Reading("a", note="earlier"), 1), (Reading("b"), 99)])
    assert subject.interval.oldest_work() == 50
    subject.restart()
    subject.feed([(Reading("b"), 100)])

    assert subject.produced("alerts") == [(Alert("a", "t"), 50)]


def test_timer_without_hold_lets_the_watermark_pass() -> None:
    subject = driver(Named())

    subject.feed([(Reading("a", note="free"), 1)])
    subject.restart()

    assert subject.interval.oldest_work() == INSTANT_MAX
    assert subject.interval.next_due() == (100, INSTANT_MAX)


@pytest.mark.parametrize("note", ["before cause", "after fire"])
def test_timer_with_an_event_time_outside_cause_and_fire_time_is_refused(note: str) -> None:
    result = driver(Named()).feed([(Reading("a", note=note), 10)])

    assert "TimerError" in result.dead_letters[0].traceback


def test_invalid_state_is_refused_even_if_a_later_record_corrects_it() -> None:
    """Else the outcome would depend on whether both are in one bundle (I9)."""

    class Healing(Computation):
        value = Value(float, default=0.0)

        def process_record(self, context: Context, record: Reading) -> None:
            context[Healing.value] = record.value

    result = driver(Healing()).feed([(Reading("a", math.nan), 1), (Reading("a", 1.0), 2)])

    assert [dead_letter.event_time for dead_letter in result.dead_letters] == [1]

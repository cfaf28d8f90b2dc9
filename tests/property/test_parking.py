"""Laws of parking: a key that stopped and was released has the effects of one that never stopped."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from millpy.computation import Context
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.record import RecordType
from millpy.model.stage import Release
from millpy.model.timer import Timer
from millpy.operators.keyed import ComputationLogic
from tests.property.test_keyed import Act, Everything, Seen
from tests.stage_driver import StageDriver


class Breaking(Everything):
    """Fails at some records and timers until it is mended."""

    def __init__(self) -> None:
        self.broken = True

    def process_record(self, context: Context, record: Act) -> None:
        if self.broken and record.what == "log":
            context[Everything.log].append("undone")
            context.set_timer("undone", at=0)
            raise ValueError("not yet")
        super().process_record(context, record)

    def process_timer(self, context: Context, timer: Timer) -> None:
        if self.broken and timer.name == "a":
            raise ValueError("not yet")
        if timer.name != "d":
            super().process_timer(context, timer)


WHATS = ["timer", "log", "put", "delete", "hold", "release", "read"]
acts = st.lists(
    st.tuples(
        st.builds(
            Act,
            key=st.sampled_from("xyz"),
            what=st.sampled_from(WHATS),
            name=st.sampled_from("abcd"),
            at=st.integers(0, 60),
        ),
        st.integers(0, 50),
    ),
    min_size=12,
    max_size=40,
)
STEPS = ["none", "none", "none", "cut", "restart", "partial", "release"]


class Account:
    """A driver that checks the step's promises about watermark and counts."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.computation = Breaking()
        logic = ComputationLogic(self.computation, parks=True)
        self.driver = StageDriver(logic, Act, outputs={"seen": RecordType(Seen)}, max_disorder=10, limits=limits)
        self.low = -(2**62)

    def feed(self, rows: list[Any]) -> None:
        self.check(self.driver.feed(rows))

    def check(self, result: Any) -> None:
        if "seen" in result.productions:
            times = result.productions["seen"].event_times.tolist()
            for record, at in zip(result.productions["seen"].objects(), times, strict=True):
                # Timers of a late record may be anywhere; everything else is held back.
                assert at >= self.low or "late" in record.what or "timer" in record.what, (record, at, self.low)
        now = min(self.driver.interval.oldest_work(), self.driver.watermark)
        self.low = max(self.low, now)

    def outcome(self) -> Any:
        stored = self.driver.stored
        state = {name: value for name, (value, _, _) in stored.items() if name[0] is Kind.STATE}
        timers = {name: fire_at for name, (_, _, fire_at) in stored.items() if name[0] is Kind.TIMER}
        produced: dict[str, list[Any]] = {}
        for record, at in self.driver.produced("seen"):
            produced.setdefault(record.key, []).append((record.what, record.state, at))
        return state, timers, produced, self.driver.interval.oldest_work(), self.driver.interval.next_due()

    def parked_records(self) -> int:
        return sum(1 for kind, namespace, *_ in self.driver.stored if kind is Kind.PARKED and namespace != "key")


def run(rows: list[Any], steps: list[str], limits: Limits | None = None) -> Account:
    """Feed everything while records fail, with restarts and vain releases in between."""
    account = Account(limits)
    bundle: list[Any] = []
    for number, row in enumerate(rows):
        bundle.append(row)
        step = steps[number] if number < len(steps) else "none"
        if step == "none":
            continue
        if step == "release":
            account.check(account.driver.release(bundle))
        else:
            account.feed(bundle)
        bundle = []
        if step in ("restart", "partial"):
            account.driver.restart(state_complete=step == "restart")
    account.feed(bundle)
    return account


@settings(max_examples=150, deadline=None)
@given(
    acts,
    st.lists(st.sampled_from(STEPS), max_size=30),
    st.sampled_from([None, Limits(state_cache_bytes_max=300)]),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_released_key_has_the_results_of_one_that_never_stopped(
    rows: list[Any], steps: list[str], limits: Limits | None, behind: int, moves: bool
) -> None:
    never = Account()
    never.computation.broken = False
    never.feed(rows)
    never.driver.finish()

    mended = max(0, len(rows) - behind)
    account = run(rows[:mended], steps, limits)
    parked = account.driver.interval.oldest_work()
    account.computation.broken = False
    if moves:
        account.driver.restart()
        assert account.driver.interval.oldest_work() == parked
    account.check(account.driver.release(rows[mended:]))
    account.check(account.driver.finish())

    assert account.outcome() == never.outcome()
    assert account.driver.parked() == {}
    assert account.parked_records() == 0
    assert sum(result.consumed_by_input.get(0, 0) for result in account.driver.results) == len(rows)
    assert not [dead_letter for result in account.driver.results for dead_letter in result.dead_letters]


def parked_once(limits: Limits | None = None) -> Account:
    """Key x stops at its second record; y continues."""
    account = Account(limits)
    whats = [("x", "put"), ("x", "log"), ("x", "put"), ("y", "put")]
    account.feed([(Act(key, what, f"n{n}", n), 20 + n) for n, (key, what) in enumerate(whats)])
    return account


def places(account: Account) -> dict[bytes, list[str]]:
    found: dict[bytes, list[str]] = {}
    for (_, namespace, key, subkey), _ in sorted(account.driver.stored.items()):
        if namespace == "places":
            found.setdefault(key, []).append(subkey)
    return found


def test_a_failing_record_stops_only_its_key_and_holds_the_watermark() -> None:
    account = parked_once()
    account.check(account.driver.feed([], watermark=1_000))

    assert places(account) == {b'"x"': ['"n0"'], b'"y"': ['"n3"']}
    assert (account.driver.results[0].consumed_by_input, account.parked_records()) == ({0: 2}, 2)
    assert account.driver.interval.oldest_work() == 21
    account.feed([(Act("x", "put", "late", 0), 5)])
    assert account.driver.interval.oldest_work() == 21
    assert account.parked_records() == 3


def test_a_late_record_is_parked_and_holds_nothing() -> None:
    account = Account()
    account.feed([(Act("y", "put", "a", 0), 100)])
    account.feed([(Act("x", "log", "a", 0), 5)])

    assert account.parked_records() == 1
    assert account.driver.interval.oldest_work() == 2**62
    account.computation.broken = False
    account.check(account.driver.release())
    assert [record.what for record, _ in account.driver.produced("seen")] == ["put", "log late"]


def test_a_record_at_the_watermark_is_parked_in_time_and_holds_it() -> None:
    account = Account()
    account.driver.max_disorder = 0
    account.feed([(Act("y", "put", "a", 0), 100), (Act("x", "log", "a", 0), 100)])
    assert account.driver.interval.oldest_work() == 100
    account.feed([(Act("y", "put", "b", 0), 200)])
    account.driver.restart()
    assert account.driver.interval.oldest_work() == 100

    account.computation.broken = False
    account.check(account.driver.release())

    assert [record.what for record, _ in account.driver.produced("seen")] == ["put", "put", "log"]


def test_a_discarded_record_becomes_a_dead_letter_and_the_others_continue() -> None:
    account = parked_once()
    account.driver.restart()

    result = account.driver.release(discard=True)

    assert places(account) == {b'"x"': ['"n0"', '"n2"'], b'"y"': ['"n3"']}
    (dead_letter,) = result.dead_letters
    assert (dead_letter.reason, dead_letter.detail, dead_letter.key) == ("user_error", "ValueError: not yet", b'"x"')
    assert b'"n1"' in dead_letter.payload
    assert "not yet" in dead_letter.traceback
    assert (result.consumed_by_input, result.dead_lettered_by_input) == ({0: 1}, {0: 1})
    assert account.driver.interval.oldest_work() == 2**62


def test_a_timer_that_fails_stops_its_key_and_can_be_discarded() -> None:
    account = Account()
    account.feed([(Act("x", "timer", "a", 30), 20), (Act("x", "timer", "b", 35), 21)])
    account.check(account.driver.feed([], watermark=100))

    assert account.driver.interval.oldest_work() == 30
    assert account.driver.interval.next_due() == (2**62, 2**62), "a stopped key must not keep its worker busy"
    account.driver.restart()
    result = account.driver.release(discard=True)

    assert b'"timer":"a"' in result.dead_letters[0].payload
    assert [record.what for record, _ in account.driver.produced("seen")][2:] == ["timer b", "timer c"]


def test_a_request_with_an_outdated_ticket_does_nothing() -> None:
    account = parked_once()
    (stale,) = account.driver.parked().items()
    account.check(account.driver.release())  # fails again: parked again, under another ticket
    assert account.driver.parked()[stale[0]] != stale[1]
    account.computation.broken = False

    account.driver.feed([], releases=[Release(1, 1, stale[0], stale[1], False)])

    assert account.parked_records() == 2
    account.check(account.driver.release())
    assert account.parked_records() == 0


def test_parked_records_are_bounded() -> None:
    account = parked_once(Limits(parked_records_max=3))

    account.feed([(Act("x", "put", f"m{n}", n), 30) for n in range(3)])

    assert account.parked_records() == 3
    result = account.driver.results[-1]
    assert (result.consumed_by_input, result.dead_lettered_by_input) == ({0: 0}, {0: 2})
    assert "already wait" in result.dead_letters[0].detail

"""Sessions that leave memory before they fire: each turn is that of a stage that has all of them in memory.

A world is a random session graph: gaps, lateness, mode, keys, bounds of a few sessions, and moves. The moves deliver
records, advance the watermark, fold (at once, without the last bundle, or before the owner learns of it), let another
worker take over, and lose commits, also while due sessions wait for their turn.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpy import Accumulation, Count, First, SessionWindows, Sum
from millpy.limits import Limits
from millpy.model.checkpoint import Kind
from millpy.model.keys import key_text
from millpy.model.record import RecordType
from millpy.model.stage import StepResult
from millpy.model.stored_windows import is_emitted, span_of
from millpy.model.time import INSTANT_MAX
from millpy.windowing import closed_sessions, unfired_sessions
from millpy.windowing.logic import WindowedLogic
from tests.property.test_spilled_windows import effects
from tests.stage_driver import StageDriver, timedelta_us

IN_MEMORY = 10**9
TURNS_MAX = 2_000
TURNS = ("records", "lost", "watermark", "nothing")
Move = tuple[str, Any]


class Visit(msgspec.Struct):
    key: str
    number: int
    gap: float | None = None


class World:
    """A random session graph, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.gap = rng.choice([1, 4, 4, 10, 30])
        self.how: dict[str, Any] = {}
        kind = rng.choice(["plain", "plain", "plain", "cut", "full", "by key", "by field"])
        if kind == "cut":
            self.how["max_length"] = timedelta_us(rng.choice([7, 20]) + self.gap)
        elif kind == "full":
            self.how["max_records"] = rng.choice([2, 3, 5])
        elif kind == "by key":
            self.how["by_key"] = {"a": timedelta_us(2), "b": timedelta_us(25)}
        elif kind == "by field":
            self.how["by_field"] = "gap"
        self.allowed = rng.choice([0, 0, 3, 20, 100])
        self.mode = rng.choice(list(Accumulation))
        self.few = rng.choice([0, 3, 10_000])
        self.keys = "abcdefghijklmnopqrstuvwxyz"[: rng.choice([1, 2, 3, 8, 26])]
        self.disorder = rng.choice([0, 5, 30, 200])
        self.panes_max = rng.choice([1, 1, 2, 3, 7, 10_000])
        self.closed, self.unfired = (1 + rng.choice([0, 0, 1, 3, 8]) * 1_100 for _ in "cu")
        self.patched = {
            "OTHERS_MAX": rng.choice([1, 2, 4]),
            "PIECE_ROWS": rng.choice([1, 2, 5, 20_000]),
            "PASSES": rng.choice([1, 2, 16]),
            "LEAVE_MAX": rng.choice([1, 2, 20_000]),
            "PANES_MIN": rng.choice([1, 2, 3, 7, 1_000]),
        }
        # A turn reads fewer panes than it may emit if memory has no room, but never fewer than PANES_MIN.
        self.panes_max = min(self.panes_max, self.patched["PANES_MIN"])
        self.moves = self._moves(rng.randrange(10, 90))

    def _moves(self, count: int) -> list[Move]:
        rng, found, now = self.rng, list[Move](), 0
        weights = {"records": 10, "watermark": 3, "nothing": 3, "ask": 2, "lost": 1}
        weights |= {"fold": rng.choice([2, 8]), "fold behind": 2, "fold unseen": 2, "learn": 2}
        weights |= {"restart": rng.choice([0, 1, 4]), "end of time": 0}
        pace = rng.choice([1, 5, 20])
        for _ in range(count):
            (what,) = rng.choices(list(weights), list(weights.values()))
            if what in ("records", "lost"):
                now += rng.randrange(pace + 1)
                found.append((what, [self._visit(now) for _ in range(rng.choice([1, 1, 2, 5, 15]))]))
            elif what == "watermark":
                now += rng.choice([0, pace, 4 * pace])
                found.append((what, now - rng.randrange(self.disorder + 1)))
            else:
                found.append((what, None))
        return found

    def _visit(self, now: int) -> tuple[Visit, int]:
        rng = self.rng
        late = rng.choice([0, 0, rng.randrange(self.disorder + 1), rng.randrange(3 * self.gap + self.allowed + 1)])
        return Visit(rng.choice(self.keys), rng.randrange(9), rng.choice([None, 1e-6, 3e-6, 40e-6])), max(0, now - late)

    def driver(self, limits: Limits) -> Owner:
        windows = SessionWindows(timedelta_us(self.gap), **self.how)
        aggregates = {"n": Count(), "total": Sum("number"), "first": First("number")}
        how = {"few_records_max": self.few, "accumulation": self.mode}
        logic = WindowedLogic(windows, timedelta_us(self.allowed), aggregates, **how)
        outputs = {"panes": logic.output_type(RecordType(Visit), ("key",))}
        subject = Owner(logic, Visit, outputs=outputs, tables={"panes": 1}, max_disorder=self.disorder, limits=limits)
        subject.panes_max = self.panes_max
        return subject


class Owner(StageDriver):
    """A driver whose store may have folded more than the owner of the interval knows.

    `changed` is what each bundle has stored or deleted, `known` the last fold that the owner knows of, and `read_upto`
    the last bundle that it has read and the fold before.
    """

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.changed: list[tuple[int, set[tuple[bytes, str]]]] = []
        self.known = 0
        self.read_upto = (0, 0)

    def commit(self, result: StepResult) -> None:
        super().commit(result)
        names = [set(zip(part.keys, part.subkeys, strict=True)) for part in result.delta if part.kind is Kind.WINDOW]
        self.changed.append((self.bundle, set[tuple[bytes, str]]().union(*names)))

    def restart(self, *, state_complete: bool = True) -> None:
        super().restart(state_complete=state_complete)
        self.known, self.read_upto = self.folded_bundle, (self.bundle, self.folded_bundle)

    def lose(self, rows: Sequence[tuple[Any, int]], *, columns: bool = False) -> None:
        super().lose(rows, columns=columns)
        self.known, self.read_upto = self.folded_bundle, (self.bundle, self.folded_bundle)

    def unfolded_from(self) -> int:
        """Return the fold behind which the names of changes may be remembered: those that were read stay together."""
        bundle, folded = self.read_upto
        return folded if self.known < bundle else self.known

    def fold_unseen(self) -> None:
        """Fold in the store only."""
        self.folded, self.folded_bundle = dict(self.stored), self.bundle

    def learn(self) -> None:
        """Tell the owner of the last fold."""
        self.interval.on_folded(self.folded_bundle)
        self.known = self.folded_bundle

    def fold(self, *, behind: bool = False) -> None:
        super().fold(behind=behind)
        self.known = self.folded_bundle

    def play(self, what: str, how: Any, few: int) -> None:
        """Make one move; every move but a turn changes only where sessions are."""
        if what == "records":
            self.feed(how, columns=few == 0)
        elif what == "lost":
            self.lose(how, columns=few == 0)
        elif what == "watermark":
            self.largest = max(self.largest or 0, how + self.max_disorder)
            self.feed([], watermark=how)
        elif what == "nothing":
            self.feed([])
        elif what == "ask":
            self.interval.needs_fold() and self.interval.waits_for_fold()
        elif what == "restart":
            self.restart()
        elif what.startswith("fold"):
            {"fold": self.fold, "fold behind": lambda: self.fold(behind=True), "fold unseen": self.fold_unseen}[what]()
        else:
            self.learn()


def rows_of(world: World, subject: StageDriver) -> dict[tuple[bytes, str], bytes]:
    """Return the stored sessions but those that are over: how many of them a turn deletes depends on where they are."""
    over_by = subject.watermark - world.allowed
    rows = {name[2:]: row[0] for name, row in subject.stored.items() if name[0] is Kind.WINDOW}
    return {name: row for name, row in rows.items() if not is_emitted(row) or span_of(name[1])[1] > over_by}


def check_turn(world: World, spilling: Owner, resident: Owner) -> None:
    """Compare the last turn, what is stored after it, and the watermark."""
    one, other = spilling.results[-1], resident.results[-1]
    assert effects(one) == effects(other)
    assert rows_of(world, spilling) == rows_of(world, resident)
    reached = min(spilling.watermark, spilling.interval.oldest_work())
    wanted = min(resident.watermark, resident.interval.oldest_work())
    assert reached <= wanted
    if not other.unfinished:
        assert not one.unfinished or reached == wanted  # a pass may have to go on
        assert reached == wanted


def check_memory(world: World, subject: Owner) -> None:
    """After a fold of all changes, only sessions that wait to be emitted exceed the bound."""
    spilled = subject.interval._open.spilled  # type: ignore[attr-defined]
    while spilled._leaves:  # a piece at a time
        subject.interval.waits_for_fold()
    if spilled._unfired_bytes() <= world.unfired:
        return
    reached = max(spilled._upto.end, -1 if spilled._pass is None else spilled._pass.ended_by)
    for sessions in subject.interval._open.by_key.values():  # type: ignore[attr-defined]
        unfired = [session for session in sessions if not session.pane.emitted]
        assert not unfired or min(session.end for session in unfired) <= reached


def check_names(subject: Owner) -> None:
    """Check that what is remembered of sessions by name is no more than has changed since the last fold."""
    spilled = subject.interval._open.spilled  # type: ignore[attr-defined]
    changed = set[tuple[bytes, str]]().union(
        *(names for bundle, names in subject.changed if bundle > subject.unfolded_from())
    )
    assert {(key_text(key), f"{start}/{end}") for key, start, end in spilled._deleted} <= changed
    assert {key_text(key) for key in spilled._fired} <= {key for key, _ in changed}
    here = {key for key, sessions in subject.interval._open.by_key.items()}  # type: ignore[attr-defined]
    assert spilled._changed.keys() <= here
    assert {key_text(key) for key in spilled._many - here} <= {key for key, _ in changed}


def play(seed: int) -> Owner:
    """Play a world with bounds, and without."""
    world = World(seed)
    spilling = world.driver(Limits(closed_windows_bytes_max=world.closed, unfired_windows_bytes_max=world.unfired))
    resident = world.driver(Limits(closed_windows_bytes_max=IN_MEMORY, unfired_windows_bytes_max=IN_MEMORY))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in world.patched.items():
            for module in (unfired_sessions, closed_sessions):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        for what, how in world.moves:
            turns = len(spilling.results)
            spilling.play(what, how, world.few)
            if what in TURNS:
                resident.play(what, how, world.few)
            if len(spilling.results) > turns:
                check_turn(world, spilling, resident)
            if what == "fold":
                check_memory(world, spilling)
            check_names(spilling)
        finish(world, spilling, resident)
    return spilling


def finish(world: World, *subjects: Owner) -> None:
    """End the source, and compare the turns until no work is left."""
    for subject in subjects:
        subject.feed([], watermark=INSTANT_MAX)
    for _ in range(TURNS_MAX):
        check_turn(world, *subjects)
        if not any(subject.results[-1].unfinished for subject in subjects):
            break
        for subject in subjects:
            subject.feed([])
    for subject in subjects:
        assert not subject.results[-1].unfinished, "the work does not come to an end"
        subject.check_ended()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**40))
def test_a_turn_does_not_depend_on_bounds_folds_and_takeovers(seed: int) -> None:
    play(seed)

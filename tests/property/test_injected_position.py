"""The position of an injected stream, against a model of transactions that commit in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from millpy.sources.postgres.injected_position import InjectedPosition, from_multirange, multirange, open_in, subtract
from millpy.sources.postgres.injected_reader import InjectedPage


@dataclass
class Model:
    """Transactions, their numbered records, and what a reader has delivered."""

    next_xid: int = 100
    next_number: int = 1
    open: set[int] = field(default_factory=set)
    records: dict[int, int] = field(default_factory=dict)  # number -> transaction
    committed: dict[int, int] = field(default_factory=dict)  # transaction -> the number that was next at its commit
    xmax: int = 100  # behind the last transaction that has ended

    def begin(self) -> None:
        self.open.add(self.next_xid)
        self.next_xid += 1

    def inject(self, xid: int) -> None:
        self.records[self.next_number] = xid
        self.next_number += 1

    def end(self, xid: int, *, commits: bool) -> None:
        self.open.discard(xid)
        self.xmax = max(self.xmax, xid + 1)
        if commits:
            self.committed[xid] = self.next_number

    def read(self, position: InjectedPosition, count: int) -> InjectedPage | None:
        """Read a page, as the reader does: what is left of a page that was cut first, alone."""
        found = self.unread(position)
        if not found and position.rest:
            position = position.without_rest()
            found = self.unread(position)
        if not found:
            return None
        page = found[:count]
        columns = (page, [b""] * len(page), [0] * len(page))
        return InjectedPage(position, *columns, open_in(self.snapshot(), self.next_xid), whole=len(found) <= count)

    def snapshot(self) -> str:
        """Return a snapshot as PostgreSQL makes it: it names the open transactions below `xmax` only."""
        named = sorted(xid for xid in self.open if xid < self.xmax)
        return f"{min([*self.open, self.xmax])}:{self.xmax}:{','.join(map(str, named))}"

    def unread(self, position: InjectedPosition) -> list[int]:
        def is_unread(number: int, xid: int) -> bool:
            if position.rest:
                return has(position.rest, xid) and position.after < number <= position.last
            return number > position.last or has(position.open, xid)

        return [n for n, xid in sorted(self.records.items()) if xid in self.committed and is_unread(n, xid)]


def has(ranges: Sequence[tuple[int, int]], xid: int) -> bool:
    return any(first <= xid < behind for first, behind in ranges)


ACTIONS = (*["begin"] * 2, *["inject"] * 6, *["commit"] * 2, "abort", *["read"] * 3)
TO_THE_END = [("commit", 0)] * 60 + [("read", 5)] * 60


@pytest.mark.parametrize("seed", range(4))
def test_each_committed_record_is_read_once_and_behind_what_committed_before_it(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        actions = [(chance.choice(ACTIONS), chance.randrange(18)) for _ in range(chance.randrange(10, 80))]
        check([*actions, *TO_THE_END])


def check(actions: Sequence[tuple[str, int]]) -> None:
    """Run the actions, and compare what was delivered with what was committed."""
    model, position, delivered = Model(), InjectedPosition(0), list[int]()
    for action, which in actions:
        live = sorted(model.open)
        if action == "begin":
            model.begin()
        elif action == "read":
            page = model.read(position, which % 3 + 1)
            while page is not None:  # it is taken in parts, and after some of them the reader dies
                part, page = page.cut(which // 6) if 0 < which // 6 < len(page.numbers) else (page, None)
                delivered += part.numbers
                position = part.position
                if which % 5 == 0:
                    break
        elif live:
            xid = live[which % len(live)]
            if action == "inject":
                model.inject(xid)
            else:
                model.end(xid, commits=action == "commit")

    committed = {number: xid for number, xid in model.records.items() if xid in model.committed}
    assert sorted(delivered) == sorted(committed), actions
    place = {number: index for index, number in enumerate(delivered)}
    for number, at in place.items():
        after = model.committed[committed[number]]  # numbers from here on were taken after its commit
        assert all(at < other for later, other in place.items() if later >= after), actions


def test_a_snapshot_names_no_transaction_from_its_xmax_on() -> None:
    assert open_in("10:20:11,15", 20) == ((11, 12), (15, 16))
    assert open_in("10:20:11,15", 23) == ((11, 12), (15, 16), (20, 23))
    assert open_in("10:10:", 10) == ()


@pytest.mark.parametrize("seed", range(4))
def test_ranges_are_subtracted_as_sets(seed: int) -> None:
    chance = random.Random(seed)

    def some() -> list[tuple[int, int]]:
        bounds = sorted(chance.sample(range(40), 2 * chance.randrange(6)))
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    for _ in range(2_000):
        ranges, others = some(), some()
        left = subtract(ranges, others)
        assert ids(left) == sorted({*ids(ranges)} - {*ids(others)})
        assert from_multirange(multirange(left)) == left


def ids(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [xid for first, behind in ranges for xid in range(first, behind)]


def test_transaction_younger_than_the_last_that_ended_is_read_when_it_commits() -> None:
    # A, B and C begin; C injects 1, B injects 2 and commits, so that xmax is behind B; C commits.
    check([*[("begin", 0)] * 3, ("inject", 2), ("inject", 1), ("commit", 1), ("read", 5), ("commit", 1), *TO_THE_END])


def test_second_cut_page_below_the_greatest_number_repeats_nothing() -> None:
    # X injects 1, Y 2 and 3, Z 4; Z commits and all is read; Y and X commit, and each read is cut after one record.
    check(
        [
            *[("begin", 0)] * 3, ("inject", 0), ("inject", 1), ("inject", 1), ("inject", 2), ("commit", 2), ("read", 5),
            ("commit", 1), ("read", 0), ("commit", 0), ("read", 0), *TO_THE_END,
        ]
    )  # fmt: skip

"""The position of an injected stream, against a model of transactions that commit in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from millpy.sources.postgres.injected_position import InjectedPosition, open_in


@dataclass
class Model:
    """Transactions, their numbered records, and what a reader has delivered."""

    next_xid: int = 100
    next_number: int = 1
    open: set[int] = field(default_factory=set)
    records: dict[int, int] = field(default_factory=dict)  # number -> transaction
    committed: dict[int, int] = field(default_factory=dict)  # transaction -> the number that was next at its commit

    def begin(self) -> None:
        self.open.add(self.next_xid)
        self.next_xid += 1

    def inject(self, xid: int) -> None:
        self.records[self.next_number] = xid
        self.next_number += 1

    def end(self, xid: int, *, commits: bool) -> None:
        self.open.discard(xid)
        if commits:
            self.committed[xid] = self.next_number

    def unread(self, position: InjectedPosition) -> list[int]:
        return [
            number
            for number, xid in sorted(self.records.items())
            if xid in self.committed
            and (number > position.last or xid in position.open or (xid in position.rest and number > position.after))
        ]


ACTIONS = ("begin", "inject", "inject", "inject", "commit", "abort", "read")
TO_THE_END = [("commit", 0)] * 60 + [("read", 5)] * 60


@pytest.mark.parametrize("seed", range(4))
def test_each_committed_record_is_read_once_and_behind_what_committed_before_it(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        actions = [(chance.choice(ACTIONS), chance.randrange(6)) for _ in range(chance.randrange(5, 60))]
        check([*actions, *TO_THE_END])


def check(actions: Sequence[tuple[str, int]]) -> None:
    """Run the actions, and compare what was delivered with what was committed."""
    model, position, delivered = Model(), InjectedPosition(0), list[int]()
    for action, which in actions:
        live = sorted(model.open)
        if action == "begin":
            model.begin()
        elif action == "read":
            found = model.unread(position)
            page = found[: which + 1]
            if page:
                delivered += page
                position = position.advance(page, sorted(model.open), whole=len(page) == len(found))
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


def test_a_snapshot_names_its_open_transactions() -> None:
    assert open_in("10:20:11,15") == (11, 15)
    assert open_in("10:10:") == ()

"""What every store promises about histories: each pane and retraction once, as the result table had it."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from millpy.errors import CommitUnknownError
from millpy.model.checkpoint import DeletedRows
from tests.conformance.store_builders import MINUTE, Owner, World, a_graph, panes

Believed = dict[str, tuple[int, Any]]


class HistorySuite:
    """Mix into a test class that has a `world` fixture."""

    @pytest.mark.parametrize("lands", ["before", "never"])
    @pytest.mark.parametrize("mode", ["accumulating", "discarding", "retracting"])
    async def test_a_history_has_each_pane_and_retraction_once(self, world: World, mode: str, lands: str) -> None:
        graph = a_graph("kept")
        graph = replace(graph, tables=(replace(graph.tables[0], history=mode), graph.tables[1]))
        store = await world.subject.store()
        owner = Owner(store, await store.deploy(graph))
        await owner.register()
        interval = owner.deployment.intervals_of("sums")[0]
        await owner.claim(interval)
        table, rng = owner.deployment.table_ids["sums_1m"], random.Random(7)
        newest: Believed = {}
        gone: dict[str, int] = {}
        expected: list[tuple[Any, ...]] = []
        returned = 0

        for turn in range(12):
            before = dict(newest), dict(gone), list(expected)
            dropped = [key for key in newest if rng.random() < 0.2]
            bundle = owner.bundles[interval.interval_id] + 1
            for key in dropped:
                gone[key], value = newest.pop(key)
                expected.append((key, gone[key], value, True, bundle))
            changed = [key for key in "abcdef" if rng.random() < 0.4 and key not in dropped]
            first, later = [], []
            for key in changed:
                index, value = newest[key][0] + 1 if key in newest else gone.pop(key, -1) + 1, float(turn)
                if key not in newest and index and rng.random() < 0.5:  # a session of the same name: another window
                    expected = [(k, at - (k == key) * index, *more) for k, at, *more in expected]
                    index, returned = 0, returned + 1
                if key in newest and mode == "retracting":
                    expected.append((key, *newest[key], True, bundle))
                expected.append((key, index, value, False, bundle))
                newest[key] = index, value
                (later if index else first).append((key, value, index))
            results = [
                panes(table, *rows, first=is_first) for rows, is_first in ((first, True), (later, False)) if rows
            ]
            count = len(dropped)
            deleted = [DeletedRows(table, [dropped, [0] * count, [MINUTE] * count], count)] if dropped else []
            checkpoint = owner.checkpoint(interval, results=results, deleted=deleted)
            if turn % 5 == 4:
                inside = world.subject.lose_answer_of_next_commit(owner.store, lands)
                with pytest.raises(CommitUnknownError):
                    await owner.commit(checkpoint, inside=inside)
                await owner.take_over_from_self()
                if owner.bundles[interval.interval_id] != bundle:
                    newest, gone, expected = before
            else:
                await owner.commit(checkpoint)

        rows = await world.subject.rows(owner.deployment, "sums_1m")
        assert {row["device"]: (row["pane_index"], row["total"]) for row in rows} == newest
        names = ("device", "pane_index", "total", "is_retraction", "bundle")
        history = await world.subject.rows(owner.deployment, "sums_1m_history")
        assert sorted(tuple(row[name] for name in names) for row in history) == sorted(expected)
        assert sum(row[3] for row in expected) > 3
        assert returned > 2

"""Live changes x every kind of window and aggregate x what is stored before, on PostgreSQL, against a recount.

A short form runs with all tests; the whole (`make deploy-matrix`) adds every aggregate by itself too, on several seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import msgspec
import pytest

from millpy import Accumulation, AfterCount, AfterWatermark, Count, Max, Mean, Sum
from millpy.errors import GraphError, GraphVersionError
from millpy.limits import Limits
from millpy.process.assembly import deploy, run_worker
from tests.crash.deploy_graphs import (
    ADDED,
    EARLY,
    END,
    KINDS,
    Kind,
    Reading,
    ReadingMaybe,
    ReadingMore,
    Rows,
    Shape,
    Spread,
    SpreadOfTexts,
    SumsFrom,
    SumsMore,
    records_of,
    recount,
)
from tests.crash.graph_files import one, rows
from tests.crash.test_versions import fed
from tests.feed import Feed

WHOLE = os.environ.get("DEPLOY_MATRIX") == "whole"
SEEDS = range(5) if WHOLE else range(1)
Stored = Literal["deltas", "rows"]
LIMITS: dict[Stored, Limits] = {
    "deltas": Limits(progress_every_s=0.02, fold_every_s=1_000, drain_grace_s=0.01, lease_ttl_s=1),
    "rows": Limits(progress_every_s=0.02, fold_every_s=0.05, lease_ttl_s=1, turn_panes_max=20),
}
stored_as = pytest.mark.parametrize("stored", list(LIMITS))
seeds = pytest.mark.parametrize("seed", SEEDS)
FOLDED = "SELECT count(DISTINCT k.interval_id) FROM mill.keyed AS k WHERE k.kind IN ('window', 'state')"


def lines(records: Sequence[Reading]) -> list[bytes]:
    return list(map(msgspec.json.encode, records))


async def begun(url: str, stored: Stored, records: Sequence[Reading]) -> Feed:
    """The base graph has taken some records, in bundles, and its worker has left."""
    feed = Feed(batch_max=70)
    feed.push(*lines(records))
    await fed(url, Shape().graph(feed), feed, LIMITS[stored])
    assert (one(url, FOLDED) > 5) == (stored == "rows")
    assert one(url, "SELECT count(*) FROM millpy.windows") > 20
    return feed


async def ended(url: str, stored: Stored, shape: Shape, feed: Feed, records: Sequence[Reading]) -> None:
    """A worker of a version takes the rest."""
    feed.push(*lines(records))
    feed.end()
    await run_worker(shape.graph(feed), url, limits=LIMITS[stored])
    assert rows(url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    assert one(url, "SELECT count(*) FROM mill.dead_letters") == 0


def table_of(url: str, name: str, kind: Kind, added: Sequence[str]) -> Rows:
    own = [] if kind.sliced else ["own"]
    names = ["n", "total", *own, *(a for a in added if not (kind.sliced and a == "spread"))]
    query = (
        f"SELECT device, extract(epoch FROM window_start)::int, extract(epoch FROM window_end)::int, {', '.join(names)}"
    )
    return {row[:3]: row[3:] for row in rows(url, f"{query} FROM factory.{name}")}


def assert_exact(url: str, records: Sequence[Reading], changed_at: int, added: Sequence[str] = ()) -> None:
    """Every table equals a recount, up to the precision of floats and sketches."""
    for name, kind in KINDS.items():
        found, wanted = table_of(url, name, kind, added), recount(records, changed_at, kind, added)
        assert found.keys() == wanted.keys(), name
        if kind.history:
            here, there = f"SELECT * FROM factory.{name}", f"SELECT * FROM millpy.as_of(NULL::factory.{name}, now())"
            assert rows(url, f"({here} EXCEPT {there}) UNION ALL ({there} EXCEPT {here})") == [], name
        for window, values in wanted.items():
            for mine, theirs in zip(found[window], values, strict=True):
                assert same(mine, theirs), (name, window, found[window], values)
    counted: dict[str, tuple[int, int]] = {}
    for record in records:
        n, total = counted.get(record.device, (0, 0))
        counted[record.device] = (n + 1, total + record.value)
    query = "SELECT DISTINCT ON (device) device, n, total FROM factory.sums ORDER BY device, n DESC"
    assert {row[0]: row[1:] for row in rows(url, query)} == counted


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, float) and theirs is not None:
        return math.isclose(mine, theirs, rel_tol=0.0101, abs_tol=1e-6)
    return bool(mine == theirs)


ADDITIONS: dict[str, Shape] = {
    "all aggregates": Shape(added=tuple(ADDED)),
    "a cell": Shape(sums=SumsMore),
    "steps and tables": Shape(more=True),
    "a field": Shape(schema=ReadingMore),
    "a field that may be None": Shape(schema=ReadingMaybe),
    "all of them": Shape(added=tuple(ADDED), sums=SumsMore, schema=ReadingMore, more=True),
}
SHORT = ("a field that may be None", "all of them")
if WHOLE:
    ADDITIONS |= {f"aggregate {name}": Shape(added=(name,)) for name in ADDED}
    ADDITIONS["aggregates in another order"] = Shape(added=tuple(reversed(ADDED)))


@pytest.mark.sampled(every=2)
@seeds
@stored_as
@pytest.mark.parametrize("change", list(ADDITIONS) if WHOLE else SHORT)
async def test_addition_is_exact_over_stored_state(database_url: str, change: str, stored: Stored, seed: int) -> None:
    records, shape = records_of(seed), ADDITIONS[change]
    middle = len(records) // 2
    feed = await begun(database_url, stored, records[:middle])

    await ended(database_url, stored, shape, feed, records[middle:])

    assert one(database_url, "SELECT version FROM mill.graphs") == 2
    assert_exact(database_url, records, middle, shape.added)
    with pytest.raises(GraphVersionError, match="has more than this file"):
        await run_worker(Shape().graph(feed), database_url, limits=LIMITS[stored])


BACK = "remove the additions: millpy deploy FILE --back"


@seeds
@stored_as
@pytest.mark.parametrize("change", list(ADDITIONS) if WHOLE else ["all of them"])
async def test_addition_can_be_removed_and_added_again(
    database_url: str, change: str, stored: Stored, seed: int
) -> None:
    """Records are in flight at each change, so each version reads what the other has written."""
    records, new, old = records_of(seed), ADDITIONS[change], Shape()
    places = [len(records) * part // 5 for part in range(6)]
    parts = [records[lo:hi] for lo, hi in pairwise(places)]
    feed = await begun(database_url, stored, parts[0])
    feed.push(*lines(parts[1]))
    await fed(database_url, new.graph(feed), feed, LIMITS[stored])
    feed.push(*lines(parts[2]))
    await fed(database_url, new.graph(feed), feed, LIMITS[stored], only=("readings",))
    with pytest.raises(GraphVersionError) as refused:
        await run_worker(old.graph(feed), database_url, limits=LIMITS[stored])
    assert refused.value.hint is not None
    assert BACK in refused.value.hint
    with pytest.raises(GraphError):
        await deploy(old.graph(feed), database_url)

    await deploy(old.graph(feed), database_url, back=True)

    assert one(database_url, "SELECT version FROM mill.graphs") == 3
    assert sorted(relations(database_url)) == relations_of(old)
    with pytest.raises(GraphVersionError, match="have been taken back"):
        await run_worker(new.graph(feed), database_url, limits=LIMITS[stored])
    feed.push(*lines(parts[3]))
    await fed(database_url, old.graph(feed), feed, LIMITS[stored])
    assert rows(database_url, "SELECT * FROM millpy.accounting WHERE NOT balanced") == []
    await deploy(new.graph(feed), database_url)
    assert sorted(relations(database_url)) == relations_of(new)
    await ended(database_url, stored, new, feed, parts[4])
    assert_exact(database_url, records, places[4], new.added)


async def test_only_additions_can_be_removed(database_url: str) -> None:
    feed = Feed()
    await deploy(Shape().graph(feed), database_url)
    before = rows(database_url, "SELECT version, description FROM mill.graphs")
    for what, shape in REFUSED.items():
        if what not in ("aggregate gone", "step gone"):
            with pytest.raises(GraphError, match="differs from this file by more than additions"):
                await deploy(shape.graph(feed), database_url, back=True)
    assert rows(database_url, "SELECT version, description FROM mill.graphs") == before


def relations(url: str) -> list[str]:
    return [row[0] for row in rows(url, "SELECT relname FROM pg_class WHERE relnamespace = 'factory'::regnamespace")]


def relations_of(shape: Shape) -> list[str]:
    tables = [*KINDS, "sums", *(("more", "of_sums") if shape.more else ())]
    histories = [f"{name}_history" for name, kind in KINDS.items() if kind.history]
    parts = [(table, ("", "_pkey", "_status")) for table in tables]
    parts += [(table, ("_event_time_idx" if table == "sums" else "_window_start_idx",)) for table in tables]
    parts += [(table, ("_live",)) for table in tables if table != "sums" and not table.startswith("slices")]
    parts += [(history, ("", "_pkey", "_emitted_at_idx")) for history in histories]
    return sorted(f"{relation}{ending}" for relation, endings in parts for ending in endings)


@seeds
@stored_as
async def test_successive_changes_are_exact(database_url: str, stored: Stored, seed: int) -> None:
    records, names = records_of(seed), list(ADDED)
    places = [len(records) * part // 4 for part in range(5)]
    feed = await begun(database_url, stored, records[: places[1]])
    for part in (1, 2):
        feed.push(*lines(records[places[part] : places[part + 1]]))
        await fed(database_url, Shape(added=names[: 4 * part]).graph(feed), feed, LIMITS[stored])

    await ended(database_url, stored, Shape(added=names), feed, records[places[3] :])

    for count, place in ((4, places[1]), (8, places[2]), (len(names), places[3])):
        for name, kind in KINDS.items():
            if kind.lateness:
                continue  # late panes of windows that an earlier version has fired: by the last version alone
            found = table_of(database_url, name, kind, names[:count][count - 4 :])
            wanted = recount(records, place, kind, names[:count][count - 4 :])
            assert found.keys() == wanted.keys()
            assert all(same(a, b) for w in wanted for a, b in zip(found[w], wanted[w], strict=True)), (count, name)


def resized(**changes: Any) -> dict[str, Kind]:
    return {name: replace(kind, **changes) if name == "fixed_late" else kind for name, kind in KINDS.items()}


LATER = AfterWatermark(early=EARLY.early, late=AfterCount(2))
REFUSED: dict[str, Shape] = {
    "size": Shape(kinds=resized(size=60, every=60)),
    "mode": Shape(kinds=resized(mode=Accumulation.RETRACTING)),
    "another mode": Shape(kinds=resized(mode=Accumulation.DISCARDING)),
    "trigger": Shape(kinds=resized(trigger=EARLY)),
    "part of a trigger": Shape(kinds=KINDS | {"fixed_early": replace(KINDS["fixed_early"], trigger=LATER)}),
    "a window over panes that are retracted": Shape(totals=True),
    "kind of window": Shape(kinds=resized(every=15)),
    "session": Shape(kinds=resized(every=0)),
    "key": Shape(key="at"),
    "intervals": Shape(intervals=3),
    "aggregate gone": Shape(base={"n": Count()}),
    "aggregate replaced": Shape(base={"n": Count(), "total": Max("value")}),
    "aggregate before others": Shape(base={"mean": Mean("value"), "n": Count(), "total": Sum("value")}),
    "parameter of a combiner": Shape(own=Spread(2)),
    "accumulator of a combiner": Shape(own=SpreadOfTexts()),
    "default of a cell": Shape(sums=SumsFrom),
    "a combiner over slices": Shape(base={"n": Count(), "total": Sum("value"), "more": Spread()}),
    "step gone": Shape(kinds={name: kind for name, kind in KINDS.items() if name != "sessions_late"}),
}


@seeds
@stored_as
async def test_refused_change_leaves_the_old_graph_running(database_url: str, stored: Stored, seed: int) -> None:
    records = records_of(seed)
    middle = len(records) // 2
    feed = await begun(database_url, stored, records[:middle])
    before = rows(database_url, "SELECT version, description FROM mill.graphs")

    for what, shape in REFUSED.items():
        with pytest.raises(GraphError):
            await deploy(shape.graph(feed), database_url)
        with pytest.raises(GraphError):
            await run_worker(shape.graph(feed), database_url, limits=LIMITS[stored])
        assert rows(database_url, "SELECT version, description FROM mill.graphs") == before, what
    await ended(database_url, stored, Shape(), feed, records[middle:])

    assert_exact(database_url, records, 0)


def test_recount_sees_windows_of_every_kind() -> None:
    """The matrix is not about nothing: windows have older records, newer ones, or both, and some are late."""
    records = records_of(0)
    middle = len(records) // 2
    for name, kind in KINDS.items():
        found = recount(records, middle, kind, ["count"])
        assert len(found) > 10, name
        assert any(values[-1] is None for values in found.values()), name
        assert any(values[-1] is not None for values in found.values()), name
    late = recount(records, 0, KINDS["fixed_late"], []), recount(records, 0, KINDS["fixed_sharp"], [])
    assert sum(v[0] for v in late[0].values()) > sum(v[0] for v in late[1].values())
    assert max(record.at for record in records) < END

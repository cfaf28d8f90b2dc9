"""What every store promises about intervals with the same keys and windows: none reads, folds or deletes another's."""

from __future__ import annotations

from typing import Any

import pytest

from millpy.model.checkpoint import Cursor, DedupeRun, Entries, Kind
from millpy.model.deployment import DeployedInterval
from millpy.model.stored_windows import (
    FIRST_PLACE,
    FIRST_SESSION,
    ClosedKind,
    EndedSessions,
    PaneNeed,
    TouchedSessions,
    UnfiredPanes,
)
from millpy.model.time import Instant
from tests.conformance.store_builders import Owner, World, a_segment, a_slice, contents, entries

WINDOWS = ("0/60", "30/60", "60/120", "120/180")


def changes(number: int) -> dict[str, Any]:
    """What an interval commits: values with a number, under names that each interval has, and under its own."""
    windows = {of: of.endswith("/60") for of in WINDOWS} | {f"{number}/{60 - 10 * number}": True}
    panes = [
        (key, {"values": [number], "emitted": fired, "firing": {"passed": fired, "waits": fired}}, of, 200)
        for key in ("a", "b", f"own {number}")
        for of, fired in windows.items()
    ]
    delta = (
        entries(Kind.STATE, "cell", ("a", number), ("b", number), (f"own {number}", 7)),
        entries(Kind.TIMER, "event", ("a", {}, "quiet", 50 + number), (f"own {number}", {}, "quiet", 60)),
        entries(Kind.WINDOW, "", *panes),
        entries(Kind.COUNTER, "consumed", ("", number, "1")),
    )
    run = DedupeRun(bytes([number]) * 16, bytes(8), Instant(100 * number), Instant(90 * number))
    return {"low_watermark": Instant(60), "input_watermark": Instant(62), "delta": delta, "dedupe_run": run}


def gone() -> tuple[Entries, ...]:
    """The deletion of everything that has the same name in all intervals."""
    windows = [(key, None, of, 200) for key in ("a", "b") for of in WINDOWS]
    return (
        entries(Kind.STATE, "cell", ("a", None), ("b", None)),
        entries(Kind.TIMER, "event", ("a", None, "quiet", 50)),
        entries(Kind.WINDOW, "", *windows),
    )


async def reads(owner: Owner, interval: DeployedInterval) -> dict[str, Any]:
    """The answers to every read of an interval's owner, after a fold of its first bundle."""
    store, grant, found = owner.store, owner.grants[interval.interval_id], {}
    for kind in ClosedKind:
        for rows_max in (0, 14, 15):
            bounds = {"state_rows_max": rows_max % 11, "closed_rows_max": rows_max}
            (opened,) = await store.read([grant], **bounds, closed=kind)
            known = opened.recovered
            found[f"{kind} {rows_max}"] = (
                contents(known),
                sorted(known.closed_windows),
                sorted(known.unfired_windows),
                known.closed_ends,
                known.unfired_from,
                known.state_complete,
                opened.cursors,
                dict(opened.last_segments),
                opened.unfolded_bytes,
            )
    keys, every = [b'"a"', b'"b"', b'"own 2"'], (-(10**6), 10**6)
    found["state"] = contents(await store.load_state(grant, keys))
    pairs = [(of, key) for of in WINDOWS for key in keys]
    found["windows"] = contents([await store.load_windows(grant, 1, *map(list, zip(*pairs, strict=True)))])
    spans = TouchedSessions(keys, [every[0]] * 3, [every[1]] * 3)
    queries = [spans, TouchedSessions(keys, [70] * 3, [80] * 3, 4)]
    queries += [EndedSessions(200, FIRST_SESSION, 99, unfired) for unfired in (False, True)]
    queries += [UnfiredPanes(of, FIRST_PLACE, 99, 10**6, need) for of in WINDOWS for need in PaneNeed]
    for query in queries:
        answer = await store.query_windows(grant, 1, query)
        found[str(query)] = sorted(zip(answer.keys, answer.subkeys, answer.values, strict=True))
    found["runs"] = list(await store.load_dedupe_runs(grant))
    return found


class NeighborSuite:
    """Mixed into the store suite."""

    @pytest.mark.parametrize("beside", ["of the same step", "of another step"])
    async def test_an_interval_reads_nothing_of_another_one(self, world: World, beside: str) -> None:
        owner, mine = await world.owner(), world.sums[0]
        other = world.sums[1] if beside == "of the same step" else world.alarms
        await owner.commit(owner.checkpoint(mine, **changes(1)))
        await owner.fold(mine)
        late = entries(Kind.STATE, "cell", ("b", 11))
        await owner.commit(owner.checkpoint(mine, **(changes(1) | {"delta": (late,)})))
        alone = await reads(owner, mine)
        assert (len(alone["windows"]), len(alone["state"])) == (8, 2)
        assert alone[f"{ClosedKind.WINDOWS} 0"][1] == ["0/60", "1/50", "30/60"], (
            "windows that end together are read, too"
        )

        await owner.commit(owner.checkpoint(world.a))
        read = [Cursor(world.a.interval_id, 1, Instant(5))]
        segment = a_segment(world.deployment.subscription_ids["sums", "alarms", 1], 1, [a_slice(1.0)])
        segments = [segment] if other in world.sums else []
        await owner.commit(owner.checkpoint(other, **changes(2), cursors=read, segments=segments))
        assert await reads(owner, mine) == alone
        committed = contents((await owner.opened(other)).recovered)
        await owner.fold(other)
        assert contents((await owner.opened(other)).recovered) == committed
        assert await reads(owner, mine) == alone
        grant = owner.grants[other.interval_id]
        await owner.store.delete_windows(grant, ["0/60", "1/50"])
        kept = await owner.store.load_windows(grant, 1, ["0/60", "30/60"], [b'"a"', b'"a"'])
        assert kept.subkeys == ["30/60"]
        await owner.commit(owner.checkpoint(other, **(changes(3) | {"delta": gone()})))
        await owner.fold(other, bytes_max=1)
        assert await reads(owner, mine) == alone

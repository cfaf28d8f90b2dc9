"""What every store promises about keyed things: recovery, folding, state on demand, dedupe runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from millpy.errors import StaleSequencerError, TransientError
from millpy.model.checkpoint import Cursor, DedupeRun, Entries, Kind
from millpy.model.stage import StoredInterval
from millpy.model.stored_windows import (
    FIRST_PLACE,
    FIRST_SESSION,
    ClosedKind,
    EndedSessions,
    PaneNeed,
    PanePlace,
    SessionPlace,
    TouchedSessions,
    UnfiredPanes,
    WindowQuery,
    place_of,
)
from millpy.model.stored_windows import panes_of as panes_in
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from tests.conformance.store_builders import NULL, Owner, World, a_segment, a_slice, contents, entries

STATE, TIMER, WINDOW = Kind.STATE, Kind.TIMER, Kind.WINDOW

BUNDLES: tuple[tuple[Entries, ...], ...] = (
    (
        entries(STATE, "cell", ("a", {"n": 1}), ("b", [1, None]), ("c", 'Grüße \U0001f600 \\ " \n')),
        entries(STATE, "map", ("a", 1, '"x"'), ("a", 2, '"y"')),
        entries(TIMER, "event", ("a", {}, "quiet", 50)),
        entries(WINDOW, "", ("a", [1.5], "0/60", 60)),
    ),
    (
        entries(STATE, "cell", ("a", {"n": 2}), ("b", None)),
        entries(STATE, "map", ("a", None, '"x"'), ("d", 3, "7")),
        entries(TIMER, "event", ("a", None, "quiet"), ("b", {}, "quiet", 70)),
        entries(TIMER, "processing", ("a", {}, "quiet", 80)),
        entries(Kind.COUNTER, "consumed", ("", 12, "1")),
    ),
    (
        entries(STATE, "cell", ("b", NULL), (("t", 7), True), (-5, 1e-300)),
        entries(WINDOW, "", ("a", None, "0/60")),
        entries(Kind.POSITION, "", ("", {"file": "x", "byte": 12})),
    ),
)

FINAL = {
    ("state", "cell", '"a"', ""): ({"n": 2}, 2**62),
    ("state", "cell", '"b"', ""): (None, 2**62),
    ("state", "cell", '"c"', ""): ('Grüße \U0001f600 \\ " \n', 2**62),
    ("state", "cell", '["t",7]', ""): (True, 2**62),
    ("state", "cell", "-5", ""): (1e-300, 2**62),
    ("state", "map", '"a"', '"y"'): (2, 2**62),
    ("state", "map", '"d"', "7"): (3, 2**62),
    ("timer", "event", '"b"', "quiet"): ({}, 70),
    ("timer", "processing", '"a"', "quiet"): ({}, 80),
    ("counter", "consumed", '""', "1"): (12, 2**62),
    ("position", "", '""', ""): ({"file": "x", "byte": 12}, 2**62),
}


class KeyedSuite:
    """State, timers, windows and folding. Mix into a test class that has a `world` fixture."""

    async def test_new_owner_reads_what_was_committed(self, world: World) -> None:
        old = await world.owner()
        await old.commit(old.checkpoint(world.a, input_watermark=Instant(9), low_watermark=Instant(8)))
        cursor = Cursor(world.a.interval_id, 1, Instant(8))
        await old.commit(
            old.checkpoint(
                world.sums[0],
                input_watermark=Instant(7),
                low_watermark=Instant(5),
                oldest_work=Instant(5),
                processing_floor=Instant(99),
                cursors=[cursor],
                delta=BUNDLES[0],
            )
        )
        await old.expire()

        new = await world.owner(world.sums[0])
        opened = await new.opened(world.sums[0])

        recovered = opened.recovered
        assert recovered.interval_id == world.sums[0].interval_id
        assert recovered.sequencer == new.grants[world.sums[0].interval_id].sequencer
        assert (recovered.bundle, recovered.folded_bundle) == (1, 0)
        assert (recovered.input_watermark, recovered.low_watermark, recovered.processing_floor) == (7, 5, 99)
        assert opened.cursors[world.a.interval_id] == (1, 8)
        assert opened.cursors[world.b.interval_id] == (0, INSTANT_MIN)
        assert opened.unfolded_bytes > 0
        assert len(contents(recovered)) == 7

    async def test_closed_windows_stay_in_the_store_until_they_are_loaded(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        owner, sums = await world.owner(world.sums[0]), world.sums[0]
        panes = [("a", [1], "0/60", 90), ("b", [2], "0/60", 90), ("a", [3], "60/120", 150), ("a", [4], "120/180", 210)]
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(120), delta=(entries(WINDOW, "", *panes),)))
        await owner.fold(sums)
        later = entries(WINDOW, "", ("a", [5], "0/60", 90), ("b", None, "0/60", 90), ("c", [6], "0/60", 90))
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(120), delta=(later,)))
        grant = owner.grants[sums.interval_id]

        (whole,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=4)
        (part,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=3)
        rows = await owner.store.load_windows(grant, 1, ["0/60", "60/120", "0/60"], [b'"a"', b'"a"', b'"x"'])
        window = await owner.store.load_windows(grant, 1, ["0/60", "0/60"], [b'"a"', b'"b"'])

        open_and_changed = {("a", "0/60"): [5], ("c", "0/60"): [6], ("a", "120/180"): [4]}
        assert panes_of(part.recovered.entries) == open_and_changed
        assert sorted(part.recovered.closed_windows) == ["0/60", "60/120"]
        assert panes_of(whole.recovered.entries) == {**open_and_changed, ("a", "60/120"): [3]}
        assert not whole.recovered.closed_windows
        assert panes_of([rows]) == {("a", "0/60"): [1], ("a", "60/120"): [3]}
        assert panes_of([window]) == {("a", "0/60"): [1], ("b", "0/60"): [2]}
        assert sorted(window.fire_ats) == [90, 90]

        # A late record has opened 60/120 behind the low watermark: it has not fired.
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(120), oldest_work=Instant(119)))
        (waiting,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=3)
        assert ("a", "60/120") in panes_of(waiting.recovered.entries)
        assert waiting.recovered.closed_windows == ["0/60"]
        with pytest.raises(TransientError, match="lost a fold"):
            await owner.store.load_windows(grant, 2, ["0/60"], None)
        for bound in ("PIECE_BYTES", "PIECE_ROWS"):
            monkeypatch.setattr(f"millpy.store.postgres.stored_windows.{bound}", 1)
        pieces = await owner.store.load_windows(grant, 1, ["0/60", "7/8", "60/120"], [b'"a"'] * 3)
        assert panes_of([pieces]) == panes_of([rows])
        await owner.store.delete_windows(grant, ["0/60", "7/8"])
        left = await owner.store.load_windows(grant, 1, ["0/60", "60/120"], [b'"a"', b'"a"'])
        assert panes_of([left]) == {("a", "60/120"): [3]}
        await owner.take_over_from_self()
        with pytest.raises(StaleSequencerError):
            await owner.store.load_windows(grant, 1, ["0/60"], None)
        with pytest.raises(StaleSequencerError):
            await owner.store.delete_windows(grant, ["60/120"])

    async def test_closed_sessions_stay_in_the_store_until_records_touch_them_or_they_end(self, world: World) -> None:
        owner, sums = await world.owner(world.sums[0]), world.sums[0]
        of_a = [("a", [n], f"{30 * n}/{30 * n + 20}", 30 * n + 50) for n in range(40)]
        waiting = ("w", {"firing": {"waits": True}}, "0/9", 39)
        edges = [("c", [8], "35/1000", 1_030), ("d", [9], "900/1001", 1_031)]
        stored = entries(WINDOW, "", *of_a, ("b", [7], "30/50", 80), *edges, waiting)
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(1_000), delta=(stored,)))
        await owner.fold(sums)
        later = entries(WINDOW, "", ("a", [50], "0/20", 50), ("b", None, "30/50", 80))
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(1_000), delta=(later,)))
        grant = owner.grants[sums.interval_id]

        async def read(rows_max: int, closed: ClosedKind) -> StoredInterval:
            bounds = {"state_rows_max": 0, "closed_rows_max": rows_max}
            (found,) = await owner.store.read([grant], **bounds, closed=closed)
            return found.recovered

        part, by_pane = await read(43, ClosedKind.SESSIONS), await read(43, ClosedKind.PANES)
        whole = await read(44, ClosedKind.SESSIONS)
        keys = [b'"a"', b'"a"', b'"b"', b'"c"', b'"x"']
        spans = TouchedSessions(keys, [45, 200, 0, 40, 0], [60, 210, 31, 41, 10**6])
        touched = await owner.store.query_windows(grant, 1, spans)
        ended: list[tuple[bytes, str, int]] = []
        places = [FIRST_SESSION]
        while len(places) % 4 == 1:
            found = await owner.store.query_windows(grant, 1, EndedSessions(260, places[-1], 4))
            assert set(found.values) <= {None}
            ended += zip(found.keys, found.subkeys, found.fire_ats, strict=True)
            places += map(place_of, panes_in(found))
        assert places == sorted(places)

        expected = {("a", f"{30 * n}/{30 * n + 20}"): [n] for n in range(33, 40)}
        expected |= {("w", "0/9"): waiting[1], ("a", "0/20"): [50], ("d", "900/1001"): [9]}
        assert panes_of(part.entries) == panes_of(by_pane.entries) == expected
        for of in (part, whole):
            assert [e.subkeys[n] for e in of.entries for n, value in enumerate(e.values) if value is None] == ["30/50"]
        assert part.closed_ends == (9, 1_000)
        assert {"30/50", "35/1000", "960/980"} <= set(by_pane.closed_windows)
        assert (whole.closed_ends, len(panes_of(whole.entries))) == (None, 43)
        assert panes_of([touched]) == {("a", "30/50"): [1], ("b", "30/50"): [7], ("c", "35/1000"): [8]}
        names = [row for row in [*of_a, ("b", [7], "30/50", 80), waiting] if int(row[2].partition("/")[2]) <= 260]
        assert sorted(ended) == sorted((json.dumps(key).encode(), subkey, at) for key, _, subkey, at in names)
        with pytest.raises(TransientError, match="lost a fold"):
            await owner.store.query_windows(grant, 2, spans)

    async def test_unfired_sessions_stay_in_the_store_until_records_touch_them_or_they_end(self, world: World) -> None:
        owner, sums = await world.owner(world.sums[0]), world.sums[0]
        open_ones = [(f"k{n}", {"values": [n]}, f"{n}/{60 + n}", 70 + n) for n in range(20)]
        alike = [(f"t{n}", {"values": [n]}, "5/65", 75) for n in range(6)]  # as many have the same place
        many = [("m", {"values": [n]}, f"{100 * n}/{100 * n + 90}", 100 * n + 100) for n in range(1, 9)]
        fired = [(f"f{n}", {"values": ['"emitted":false'], "emitted": True}, "1/31", 41) for n in range(5)]
        fired.append(("g", {"values": [], "emitted": True}, "2/61", 71))
        stored = entries(WINDOW, "", *open_ones, *alike, *many, *fired, ("l", {"values": []}, "10/70", 80))
        stored.key_hashes = [7 if key.startswith(b'"t') else 9 + place for place, key in enumerate(stored.keys)]
        of = {"low_watermark": Instant(59), "input_watermark": Instant(62), "oldest_work": Instant(59)}
        await owner.commit(owner.checkpoint(sums, **of, delta=(stored,)))
        await owner.fold(sums)
        later = entries(WINDOW, "", ("k1", None, "1/61", 71), ("k1", {"values": [9]}, "1/64", 74))
        await owner.commit(owner.checkpoint(sums, **of, delta=(later,)))
        grant = owner.grants[sums.interval_id]

        async def query(asked: WindowQuery) -> list[tuple[str, str]]:
            answer = await owner.store.query_windows(grant, 1, asked)
            return [(json.loads(key), subkey) for key, subkey in zip(answer.keys, answer.subkeys, strict=True)]

        kind = ClosedKind.UNFIRED_SESSIONS
        (read,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=len(stored), closed=kind)
        (left,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=len(stored) - 1, closed=kind)
        one = await query(EndedSessions(65, SessionPlace(60, 0, 50), 3, unfired=True))
        tied = await query(EndedSessions(65, SessionPlace(64, 4, 99), 2, unfired=True))
        following = await query(EndedSessions(INSTANT_MAX, SessionPlace(79, 19, 99), 1, unfired=True))
        touched = TouchedSessions([b'"m"', b'"k3"', b'"f1"', b'"x"'], [400, 70, 200, 0], [450, 75, 210, 99], 4)

        assert (read.recovered.unfired_from, read.recovered.closed_ends) == (INSTANT_MAX, None)
        assert len(panes_of(read.recovered.entries)) == len(stored)
        assert (left.recovered.unfired_from, left.recovered.closed_ends) == (60, (31, 62))
        assert panes_of(left.recovered.entries) == {("k1", "1/64"): {"values": [9]}}
        assert [
            subkey for e in left.recovered.entries for subkey, v in zip(e.subkeys, e.values, strict=True) if v is None
        ] == ["1/61"]
        assert one == [("k1", "1/61"), ("k2", "2/62"), ("k3", "3/63")]
        assert sorted(tied) == [(f"t{n}", "5/65") for n in range(6)]
        assert following == [("m", "100/190")]
        assert sorted(await query(touched)) == [
            ("k3", "3/63"),
            *[("m", f"{100 * n}/{100 * n + 90}") for n in (1, 2, 3, 4, 5)],
        ]

    @pytest.mark.parametrize("seed", range(3))
    async def test_queries_of_sessions_read_what_a_loop_over_the_rows_reads(self, world: World, seed: int) -> None:
        owner, sums, rng = await world.owner(world.sums[0]), world.sums[0], random.Random(seed)
        rows: list[tuple[str, object, str, int]] = []
        for key in "abcdefgh"[: rng.choice([2, 8])]:
            end = 0
            for n in range(40 if key == "a" else rng.choice([0, 1, 3, 40])):
                start = end + rng.choice([0, 1, 20])
                end = start + rng.randrange(1, 30)
                rows.append(
                    (
                        key,
                        {"values": [n], "emitted": True} if rng.random() < 0.4 else {"values": [n]},
                        f"{start}/{end}",
                        end,
                    )
                )
        stored = entries(WINDOW, "", *rows)
        stored.key_hashes = [key[1] % 3 for key in stored.keys]  # many have the same place
        await owner.commit(owner.checkpoint(sums, delta=(stored,)))
        await owner.fold(sums)
        grant, found = owner.grants[sums.interval_id], 0

        for _ in range(40):
            keys = sorted(rng.choice([b'"a"', b'"b"', b'"h"', b'"x"']) for _ in range(rng.randrange(1, 6)))
            lows = [rng.randrange(400) for _ in keys]
            highs = [low + rng.choice([1, 20, 300]) for low in lows]
            after = rng.choice([FIRST_SESSION, SessionPlace(rng.randrange(400), rng.randrange(400), rng.randrange(3))])
            ended = EndedSessions(
                rng.choice([rng.randrange(400), INSTANT_MAX]), after, rng.choice([1, 3, 50]), rng.random() < 0.5
            )
            for query in (TouchedSessions(keys, lows, highs, rng.choice([0, 1, 4])), ended):
                answer = await owner.store.query_windows(grant, 1, query)
                wanted = query.answer(panes_in(stored))
                assert sorted(panes_in(answer)) == sorted(panes_in(wanted)), query
                found += len(answer)
        assert found > 20

    async def test_unfired_windows_stay_in_the_store_until_their_panes_are_next(self, world: World) -> None:
        owner, sums = await world.owner(world.sums[0]), world.sums[0]
        tricky = {"values": [{"emitted": True}, '"emitted":true']}
        panes = [(f"k{n}", tricky if n == 7 else {"values": [n]}, "60/120", 120) for n in range(20)]
        gone = [(f"e{n}", {"values": [n], "emitted": True}, "60/120", 120) for n in range(5)]
        stored = entries(
            WINDOW, "", *panes, *gone, ("k0", {"values": []}, "0/60", 60), ("k0", {"values": []}, "6/126", 126)
        )
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(60), delta=(stored,)))
        await owner.fold(sums)
        later = entries(WINDOW, "", ("k1", None, "60/120", 120), ("k2", {"values": [9]}, "60/120", 120))
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(60), delta=(later,)))
        grant = owner.grants[sums.interval_id]

        (read,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=27, closed=ClosedKind.UNFIRED)
        (left,) = await owner.store.read([grant], state_rows_max=0, closed_rows_max=26, closed=ClosedKind.UNFIRED)
        found, after = [], FIRST_PLACE
        for bytes_max in (10**6, 1, 10**6, 10**6, 10**6):
            part = await owner.store.query_windows(grant, 1, UnfiredPanes("60/120", after, 6, bytes_max))
            assert len(part) == (1 if bytes_max == 1 else min(6, 20 - len(found)))
            assert set(part.subkeys) <= {"60/120"}
            found += list(map(PanePlace, part.key_hashes, part.keys))
            after = found[-1]

        assert (read.recovered.unfired_windows, len(panes_of(read.recovered.entries))) == ([], 26)
        assert sorted(left.recovered.unfired_windows) == ["6/126", "60/120"]
        assert left.recovered.closed_windows == ["0/60"]
        assert panes_of(left.recovered.entries) == {("k2", "60/120"): {"values": [9]}}
        assert [e.keys[n] for e in left.recovered.entries for n, value in enumerate(e.values) if value is None] == [
            b'"k1"'
        ]
        assert found == sorted(found), "in the order of places"
        assert {place.key for place in found} == {b'"k%d"' % n for n in range(20)}, "without those that are emitted"
        with pytest.raises(TransientError, match="lost a fold"):
            await owner.store.query_windows(grant, 2, UnfiredPanes("60/120", FIRST_PLACE, 6, 1))
        await owner.take_over_from_self()
        with pytest.raises(StaleSequencerError):
            await owner.store.query_windows(grant, 1, UnfiredPanes("60/120", FIRST_PLACE, 6, 1))

    async def test_panes_of_a_trigger_stay_in_the_store_until_they_need_something(self, world: World) -> None:
        owner, sums = await world.owner(world.sums[0]), world.sums[0]

        def pane(n: int, **firing: object) -> object:
            return {
                "values": [n, '"passed":true,"waits":true'],
                "emitted": n % 2 == 0,
                "firing": {"trigger": [0], **firing},
            }

        new = [(f"n{n}", pane(n, since=n), "60/120", 220) for n in range(6)]
        done = [(f"d{n}", pane(n, passed=True), "60/120", 220) for n in range(6)]
        waiting = [(f"w{n}", pane(n, since=1, late=1, passed=True, waits=True), "60/120", 220) for n in range(6)]
        closed = [("d", pane(1, passed=True), "0/60", 160), ("w", pane(1, passed=True, waits=True), "0/60", 160)]
        stored = entries(WINDOW, "", *new, *done, *waiting, *closed)
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(60), delta=(stored,)))
        await owner.fold(sums)
        later = entries(WINDOW, "", ("w", None, "0/60", 160))
        await owner.commit(owner.checkpoint(sums, low_watermark=Instant(60), delta=(later,)))
        grant = owner.grants[sums.interval_id]

        async def read(rows_max: int) -> StoredInterval:
            bounds = {"state_rows_max": 0, "closed_rows_max": rows_max}
            (found,) = await owner.store.read([grant], **bounds, closed=ClosedKind.UNFIRED_PANES)
            return found.recovered

        async def need(what: PaneNeed, subkey: str, rows_max: int) -> list[str]:
            found, after = [], FIRST_PLACE
            while len(
                part := await owner.store.query_windows(grant, 1, UnfiredPanes(subkey, after, rows_max, 10**6, what))
            ):
                found += [json.loads(key) for key in part.keys]
                after = PanePlace(part.key_hashes[-1], part.keys[-1])
            return sorted(found)

        whole, left = await read(20), await read(19)
        assert (whole.unfired_windows, whole.closed_windows, len(panes_of(whole.entries))) == ([], [], 19)
        assert (list(left.unfired_windows), list(left.closed_windows)) == (["60/120"], ["0/60"])
        assert panes_of(left.entries) == {}
        assert [e.keys for e in left.entries if None in e.values] == [[b'"w"']], "a deletion that is not folded"
        for rows_max in (4, 100):
            assert await need(PaneNeed.END, "60/120", rows_max) == [f"n{n}" for n in range(6)]
            assert await need(PaneNeed.EXPIRY, "60/120", rows_max) == [f"w{n}" for n in range(6)]
            assert len(await need(PaneNeed.EMISSION, "60/120", rows_max)) == 9
            assert await need(PaneNeed.EXPIRY, "0/60", rows_max) == ["w"], "a row without the changes since"

    async def test_processing_floor_may_be_lowered_after_a_wrong_clock(self, world: World) -> None:
        owner = await world.owner()
        for floor in (10**18, 99, INSTANT_MIN):  # the last is that of an injector, which has no floor
            await owner.commit(owner.checkpoint(world.sums[0], processing_floor=Instant(floor)))

        assert (await owner.opened(world.sums[0])).recovered.processing_floor == 99

    async def test_interval_that_never_committed_is_empty(self, world: World) -> None:
        owner = await world.owner(world.sums[0])

        opened = await owner.opened(world.sums[0])

        assert (opened.recovered.bundle, opened.unfolded_bytes) == (0, 0)
        assert opened.recovered.low_watermark == INSTANT_MIN
        assert opened.recovered.state_complete
        assert contents(opened.recovered) == {}

    async def test_intervals_are_read_in_the_requested_order(self, world: World) -> None:
        owner = await world.owner()
        grants = [owner.grants[i.interval_id] for i in reversed(world.deployment.intervals)]

        opened = await owner.store.read(grants, state_rows_max=0)

        assert [o.recovered.interval_id for o in opened] == [g.interval_id for g in grants]

    @pytest.mark.parametrize("folds_after", [(), (1,), (2,), (3,), (1, 2), (1, 2, 3)])
    async def test_folded_and_unfolded_reads_are_equal(self, world: World, folds_after: tuple[int, ...]) -> None:
        owner = await world.owner(world.sums[0])
        for bundle, delta in enumerate(BUNDLES, start=1):
            await owner.commit(owner.checkpoint(world.sums[0], delta=delta))
            if bundle in folds_after:
                await owner.fold(world.sums[0])

        opened = await owner.opened(world.sums[0])

        assert contents(opened.recovered) == FINAL
        assert opened.recovered.folded_bundle == max(folds_after, default=0)
        assert await state_of(owner, world, "a", "b", ("t", 7)) == {
            name: value for name, value in FINAL.items() if name[0] == "state" and name[2] in ('"a"', '"b"', '["t",7]')
        }

    async def test_folding_in_small_pieces_gives_the_same_result(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        for delta in BUNDLES:
            await owner.commit(owner.checkpoint(world.sums[0], delta=delta))

        await owner.fold(world.sums[0], bytes_max=1)

        opened = await owner.opened(world.sums[0])
        assert contents(opened.recovered) == FINAL
        assert (opened.recovered.folded_bundle, opened.unfolded_bytes) == (3, 0)

    async def test_old_value_is_never_folded_over_a_new_one(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        for value in range(1, 6):
            await owner.commit(owner.checkpoint(world.sums[0], delta=(entries(STATE, "cell", ("k", value)),)))
            if value == 2:
                await owner.fold(world.sums[0])
        await owner.take_over_from_self()
        await owner.fold(world.sums[0], bytes_max=1)
        await owner.commit(owner.checkpoint(world.sums[0], delta=(entries(STATE, "cell", ("k", 6)),)))
        await owner.fold(world.sums[0], bytes_max=1)

        assert [value for value, _ in (await state_of(owner, world, "k")).values()] == [6]

    async def test_tombstone_hides_the_folded_value_until_it_is_set_again(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        found = []
        for value in (1, None, 2):
            await owner.commit(owner.checkpoint(world.sums[0], delta=(entries(STATE, "cell", ("k", value)),)))
            found.append([v for v, _ in (await state_of(owner, world, "k")).values()])
            await owner.fold(world.sums[0])
            found.append([v for v, _ in (await state_of(owner, world, "k")).values()])

        assert found == [[1], [1], [], [], [2], [2]]

    async def test_null_is_a_value_and_not_a_tombstone(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        await owner.commit(owner.checkpoint(world.sums[0], delta=(entries(STATE, "cell", ("k", NULL)),)))
        before = await state_of(owner, world, "k")
        await owner.fold(world.sums[0])

        assert list(before.values()) == [(None, 2**62)]
        assert await state_of(owner, world, "k") == before

    async def test_state_beyond_the_limit_is_loaded_on_demand(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        state = entries(STATE, "cell", *((f"k{n}", n) for n in range(10)))
        timers = entries(TIMER, "event", *((f"k{n}", {}, "t", n) for n in range(10)))
        await owner.commit(owner.checkpoint(world.sums[0], delta=(state, timers)))
        await owner.fold(world.sums[0])

        few = (await owner.opened(world.sums[0], state_rows_max=5)).recovered
        whole = (await owner.opened(world.sums[0], state_rows_max=10)).recovered

        assert not few.state_complete
        assert sum(name[0] == "timer" for name in contents(few)) == 10
        assert whole.state_complete
        assert len(contents(whole)) == 20
        assert [v for v, _ in (await state_of(owner, world, "k3")).values()] == [3]

    async def test_loading_state_returns_only_the_requested_keys(self, world: World) -> None:
        owner = await world.owner(world.sums[0])
        await owner.commit(owner.checkpoint(world.sums[0], delta=BUNDLES[0]))
        await owner.fold(world.sums[0])
        await owner.commit(owner.checkpoint(world.sums[0], delta=BUNDLES[1]))

        found = await state_of(owner, world, "a", "d", "nobody")

        assert {name[1:] for name in found} == {("cell", '"a"', ""), ("map", '"a"', '"y"'), ("map", '"d"', "7")}

    async def test_intervals_do_not_see_each_others_state(self, world: World) -> None:
        owner = await world.owner(*world.sums)
        for number, interval in enumerate(world.sums):
            await owner.commit(owner.checkpoint(interval, delta=(entries(STATE, "cell", ("k", number)),)))
        await owner.fold(world.sums[0])

        assert [v for v, _ in contents((await owner.opened(world.sums[0])).recovered).values()] == [0]
        assert [v for v, _ in contents((await owner.opened(world.sums[1])).recovered).values()] == [1]

    async def test_owner_knows_the_last_segment_of_each_subscription(self, world: World) -> None:
        owner = await world.owner()
        segment = a_segment(world.by_device, 1, [a_slice(1.0), None])
        await owner.commit(owner.checkpoint(world.a, segments=[segment]))
        await owner.commit(owner.checkpoint(world.a))

        last = (await owner.opened(world.a)).last_segments

        assert last.get(world.by_device, 0) == 1
        assert last.get(world.by_room, 0) == 0
        assert (await owner.opened(world.b)).last_segments.get(world.by_device, 0) == 0

        await owner.commit(
            owner.checkpoint(world.a, segments=[a_segment(world.by_device, 3, [a_slice(2.0), None], previous=1)])
        )
        assert (await owner.opened(world.a)).last_segments[world.by_device] == 3


class DedupeSuite:
    """Dedupe runs. Mix into a test class that has a `world` fixture."""

    async def test_runs_come_back_oldest_first(self, world: World) -> None:
        owner = await world.owner(world.a, world.b)
        runs = [a_run(number, expires_at=100 + number, clock=number) for number in range(3)]
        for run in runs:
            await owner.commit(owner.checkpoint(world.a, dedupe_run=run))
        await owner.commit(owner.checkpoint(world.b, dedupe_run=a_run(9, expires_at=999, clock=900)))

        assert list(await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id])) == runs

    async def test_run_expires_once_the_dedupe_clock_is_past_it(self, world: World) -> None:
        owner = await world.owner(world.a)
        runs = [a_run(1, expires_at=10, clock=0), a_run(2, expires_at=20, clock=5), a_run(3, expires_at=30, clock=20)]
        for run in runs:
            await owner.commit(owner.checkpoint(world.a, dedupe_run=run))

        assert list(await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id])) == runs[1:]

    async def test_whole_run_replaces_those_before_it(self, world: World) -> None:
        owner = await world.owner(world.a)
        runs = [a_run(1, expires_at=90, clock=0), a_run(2, expires_at=90, clock=5), a_run(3, expires_at=90, clock=6)]
        runs[1] = replace(runs[1], whole=True)
        for run in runs:
            await owner.commit(owner.checkpoint(world.a, dedupe_run=run))

        assert list(await owner.store.load_dedupe_runs(owner.grants[world.a.interval_id])) == runs[1:]


def panes_of(found: Iterable[Entries]) -> dict[tuple[object, str], object]:
    """(key, subkey) -> value."""
    return {(json.loads(key), subkey): value for (_, _, key, subkey), (value, _) in contents(list(found)).items()}


def a_run(number: int, *, expires_at: int, clock: int) -> DedupeRun:
    """A run of one id."""
    times = number.to_bytes(8, "little")
    return DedupeRun(number.to_bytes(16, "big"), times, Instant(expires_at), Instant(clock))


async def state_of(owner: Owner, world: World, *keys: object) -> dict[tuple[str, str, str, str], tuple[object, int]]:
    """What `load_state` finds for keys."""
    texts = [name.encode() for name in map(_text, keys)]
    return contents(await owner.store.load_state(owner.grants[world.sums[0].interval_id], texts))


def _text(key: object) -> str:
    from millpy.model.keys import key_text

    return key_text(key).decode()  # type: ignore[arg-type]

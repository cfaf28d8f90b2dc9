from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpy.ingest import device_stats as fleets
from millpy.ingest.device_stats import DeviceStats
from millpy.model.checkpoint import Entries
from millpy.model.keys import KeyColumn, KeyHasher, key_text
from millpy.model.time import Instant

S = 1_000_000


def a_fleet(*recovered: Entries) -> DeviceStats:
    return DeviceStats(("device",), (str,), recovered)


def column(devices: list[str]) -> KeyColumn:
    keys = list(dict.fromkeys(devices))
    codes = np.array([keys.index(device) for device in devices], np.int32)
    return KeyColumn(codes, list(keys), KeyHasher().hashes(keys))


def stored(entries: Entries) -> dict[str, list[float]]:
    return {
        msgspec.json.decode(key): msgspec.json.decode(value or b"")
        for key, value in zip(entries.keys, entries.values, strict=True)
    }


bundles = st.lists(
    st.tuples(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 99)), max_size=200), st.booleans()),
    max_size=8,
)


@given(bundles)
def test_counts_and_times_do_not_depend_on_bundles(
    parts: list[tuple[list[tuple[str, int]], bool]],
) -> None:
    fleet, records, newest, arrived = a_fleet(), Counter[str](), dict[str, int](), dict[str, int]()
    for number, (rows, hands_over) in enumerate(parts):
        now = Instant(number * S)
        if rows:
            fleet.take(column([d for d, _ in rows]), np.array([at for _, at in rows], np.int64), now)
        for device, at in rows:
            records[device] += 1
            newest[device] = max(newest.get(device, at), at)
            arrived[device] = now
        if hands_over and records:
            everything = a_fleet(fleet.entries(now))
            fleet = everything if len(everything) == len(records) else fleet

    for device, values in stored(fleet.entries(Instant(99 * S))).items():
        assert values[:4] == [records[device], 0, newest[device], arrived[device]]


def test_only_changed_statistics_are_written_about_once_a_second() -> None:
    fleet = a_fleet()
    fleet.take(column(["a", "b"]), np.array([1, 2], np.int64), Instant(0))
    assert fleet.due(Instant(0))
    assert set(stored(fleet.entries(Instant(0)))) == {"a", "b"}

    fleet.take(column(["b"]), np.array([3], np.int64), Instant(S // 2))

    assert not fleet.due(Instant(S - 1))
    assert fleet.due(Instant(S - 1), at_last=True)
    assert fleet.due(Instant(S))
    assert set(stored(fleet.entries(Instant(S)))) == {"b"}
    assert not fleet.due(Instant(9 * S), at_last=True)


def test_many_devices_are_written_less_often() -> None:
    fleet, many = a_fleet(), [f"dev-{n}" for n in range(10_000)]
    fleet.take(column(many), np.zeros(len(many), np.int64), Instant(0))
    fleet.entries(Instant(0))
    fleet.take(column(many), np.zeros(len(many), np.int64), Instant(1))

    assert not fleet.due(Instant(4 * S))
    assert fleet.due(Instant(5 * S))


def test_duplicates_count_as_a_sign_of_life_of_their_device() -> None:
    fleet = a_fleet()
    fleet.take(column(["a"]), np.array([1], np.int64), Instant(0))
    fleet.take_duplicates(column(["a", "a", "b"]), Instant(7))

    found = stored(fleet.entries(Instant(8)))

    assert found["a"][:4] == [1, 2, 1, 7]
    assert (found["b"][1], found["b"][3]) == (1, 7)


def test_rate_follows_a_devices_records() -> None:
    fleet = a_fleet()
    rates = []
    for second in range(1, 301):
        fleet.take(column(["a"] * 10), np.zeros(10, np.int64), Instant(second * S))
        rates.append(stored(fleet.entries(Instant(second * S)))["a"][4])

    assert rates == pytest.approx([10] * 300, rel=0.02), "a new device's rate is over the time in which it was known"


def test_new_owner_continues_counting() -> None:
    fleet = a_fleet()
    fleet.take(column(["a", "b"]), np.array([5, 6], np.int64), Instant(0))

    after = a_fleet(fleet.entries(Instant(0)))
    after.take(column(["b"]), np.array([4], np.int64), Instant(S))

    assert stored(after.entries(Instant(S)))["b"][:4] == [2, 0, 6, S]


def test_devices_beyond_the_limit_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "DEVICES_MAX", 2)
    fleet = a_fleet()

    for count in (3, 300):
        fleet.take(column(["a", "b", "c"] * count), np.zeros(3 * count, np.int64), Instant(0))

    assert {device: values[0] for device, values in stored(fleet.entries(Instant(0))).items()} == {"a": 303, "b": 303}


def test_without_devices_nothing_is_counted() -> None:
    assert not DeviceStats((), ()).due(Instant(0), at_last=True)
    assert key_text("a") == b'"a"'

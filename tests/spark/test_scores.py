"""Scores against plain Python over the same windows, which shares no code with them; all from one Spark job."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import random
import statistics
import zoneinfo
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as fn

from millpy.errors import ConfigError
from millpy.spark.scores import History, judged
from millpy.spark.statistics import Columns

ZONE = zoneinfo.ZoneInfo("Europe/Berlin")
HALF_HOUR = dt.timedelta(minutes=30)
DAYS = 52
FIRST = dt.date(2026, 2, 20)
CLOCKS_CHANGE = dt.date(2026, 3, 29)
FAULTY = dt.date(2026, 4, 10)
"""A Friday."""
HISTORY = History(zone="Europe/Berlin")
Points = list[tuple[dt.datetime, float]]


class Judgment(NamedTuple):
    baseline: str | None
    expected: float | None
    scale: float | None
    score: float | None


Found = dict[str, list[tuple[dt.datetime, Judgment, bool]]]


def value(device: str, local: dt.datetime, rng: random.Random) -> float:
    """Six hours of a day, two windows an hour."""
    faulty = local.date() == FAULTY
    match device:
        case "press":  # busy at eight by the clocks of its place; once at ten, too
            busy = local.hour == 8 or (faulty and local.hour == 10)
            return (100.0 if busy else 10.0) + rng.gauss(0, 1)
        case "office":  # idle at weekends; once on a Friday
            return (5.0 if local.weekday() >= 5 or faulty else 50.0 + local.hour) + rng.gauss(0, 1)
        case "room":  # warms by the day, with a season
            return round(18 + local.hour / 4 + (local.date() - FIRST).days / 5 + rng.gauss(0, 0.3), 1)
        case "sealed":  # nearly constant; then half a unit off
            return (20.5 if faulty and local.hour == 7 else 20.0) + rng.random() / 1000
        case _:  # as good as no meter
            return 0.0


def fleet() -> dict[str, Points]:
    rng = random.Random(5)
    made: dict[str, Points] = {}
    for device in ("press", "office", "room", "sealed", "unplugged"):
        made[device] = []
        for day in range(DAYS):
            first = dt.datetime.combine(FIRST + dt.timedelta(days=day), dt.time(6), ZONE).astimezone(dt.UTC)
            for start in (first + HALF_HOUR * place for place in range(12)):
                made[device].append((start, value(device, start.astimezone(ZONE), rng)))
    return made


def deviation(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    apart = [abs(one - middle) for one in values]
    return statistics.median(apart) * 1.4826 or statistics.fmean(apart) * 1.2533


def nearest(values: Sequence[float], share: float) -> float:
    return sorted(values)[max(math.ceil(share * len(values)) - 1, 0)]


def by_quartiles(values: Sequence[float]) -> float:
    return (nearest(values, 0.75) - nearest(values, 0.25)) / 1.349


def reference_floors(made: dict[str, Points]) -> dict[str, tuple[float, float]]:
    """Device -> the smallest scale against hours, and against the latest windows."""
    spreads, finest = {}, {}
    for device, points in made.items():
        values = [one for _, one in points]
        spreads[device] = by_quartiles(values)
        steps = [abs(b - a) for a, b in itertools.pairwise(values) if a != b]
        finest[device] = nearest(steps, 0.05) if len(steps) >= 20 else 0.0
    typical = nearest([one for one in spreads.values() if one], 0.25)
    sizes = {device: nearest([abs(one) for _, one in points], 0.5) / 1000 for device, points in made.items()}
    floors = {device: max(finest[device], typical / 10, sizes[device]) for device in made}
    return {device: (floor, max(floor, spreads[device] / 3)) for device, floor in floors.items()}


def reference(points: Points, floor: float, recent_floor: float) -> list[Judgment]:
    """The judgments of one device's windows, from the definition in docs/spark.md."""
    hours: dict[tuple[dt.date, int], list[float]] = defaultdict(list)
    for start, number in points:
        hours[start.astimezone(ZONE).date(), start.astimezone(ZONE).hour].append(number)
    middles = {name: statistics.median(values) for name, values in hours.items()}
    ranges = {name: (max(values) - min(values)) / 2 / 1.349 for name, values in hours.items()}  # quartiles of two
    base: dict[tuple[dt.date, int], float] = {}
    rests: dict[tuple[dt.date, int], float] = {}
    seasonal: dict[tuple[dt.date, int], tuple[str, float, float, int]] = {}
    for day, hour in middles:
        ages = [((day - one[0]).days, one) for one in middles if one[1] == hour]
        earlier = [one for age, one in ages if 1 <= age <= 28]
        weekdays = [one for age, one in ages if 1 <= age <= 56 and age % 7 == 0]
        same = weekdays if len(weekdays) >= 6 else earlier if len(earlier) >= 5 else []
        if not same:
            continue
        base[day, hour] = statistics.median(middles[one] for one in same)
        lately = [
            middles[one] - base[one]
            for one in base
            if 1 <= (day - one[0]).days * 24 + hour - one[1] <= 72  # by the clock, as the hours are counted
        ]
        usual = base[day, hour] + (statistics.median(lately) if len(lately) >= 6 else 0.0)
        rests[day, hour] = middles[day, hour] - usual
        left = [rests[one] for one in earlier if one in rests]
        if len(left) >= 5:
            spread = math.hypot(deviation(left), statistics.median(ranges[one] for one in earlier))
            name = "weekday" if same is weekdays else "hour"
            seasonal[day, hour] = (name, usual, spread, len(left))
    own = 0.75 * math.hypot(by_quartiles([*rests.values()]), nearest([*ranges.values()], 0.5)) if rests else 0.0
    judgments = []
    for place, (start, number) in enumerate(points):
        past = [one for _, one in points[max(0, place - 30) : place]]
        local = start.astimezone(ZONE)
        if (local.date(), local.hour) in seasonal:
            name, usual, spread, days = seasonal[local.date(), local.hour]
            scale = max(spread, own, floor) * (1 + 4 / days)
        elif len(past) >= 8:
            name, usual = "recent", statistics.median(past)
            scale = max(deviation(past), recent_floor) * (1 + 8 / len(past))
        else:
            judgments.append(Judgment(None, None, None, None))
            continue
        judgments.append(Judgment(name, usual, scale, abs(number - usual) / scale))
    return judgments


@pytest.fixture(scope="module")
def found(spark: SparkSession) -> Found:
    """Device -> its judged windows in order of time. Compiling the plan would take longer than interpreting it."""
    rows = [(device, start, start + HALF_HOUR, one) for device, points in fleet().items() for start, one in points]
    names = ["day", "window_start", "window_end", "middle"]  # as columns of the computation are named, too
    windows = spark.createDataFrame(pa.table([*map(list, zip(*rows, strict=True))], names=names))
    interpreted = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    before = {name: spark.conf.get(name) for name in interpreted}
    for name, setting in interpreted.items():
        spark.conf.set(name, setting)
    try:
        of_all = judged(windows, Columns(("day",), "middle"), HISTORY)
        collected = of_all.withColumn("us", fn.unix_micros("window_start")).orderBy("us").collect()
    finally:
        for name, setting in before.items():
            spark.conf.set(name, setting)
    found: Found = defaultdict(list)
    for row in collected:
        judgment = Judgment(row["baseline"], row["expected"], row["scale"], row["score"])
        found[row["day"]].append((dt.datetime.fromtimestamp(row["us"] / 1e6, dt.UTC), judgment, row["outlier"]))
    return found


def flagged(found: Found, device: str) -> list[dt.datetime]:
    return [start.astimezone(ZONE) for start, _, outlier in found[device] if outlier]


def test_every_score_is_that_of_plain_python(found: Found) -> None:
    made = fleet()
    floors = reference_floors(made)
    seen = set()
    for device, points in made.items():
        wanted = reference(points, *floors[device])
        assert [start for start, _, _ in found[device]] == [start for start, _ in points]
        for (start, judgment, outlier), right in zip(found[device], wanted, strict=True):
            assert (judgment.baseline, judgment.score is None) == (right.baseline, right.score is None), (device, start)
            if right.score is not None:
                assert judgment[1:] == pytest.approx(right[1:], rel=1e-9, abs=1e-9), (device, start)
            assert outlier == (right.score is not None and right.score >= 5)
            seen.add(right.baseline)
    assert seen == {None, "recent", "hour", "weekday"}


def test_a_busy_hour_is_unusual_only_at_another_time_of_day(
    found: Found,
) -> None:
    settled = [one for one in flagged(found, "press") if one.date() > FIRST + dt.timedelta(days=12)]

    assert [(one.date(), one.hour) for one in settled] == [(FAULTY, 10)] * 2


def test_hours_follow_the_clocks_of_the_zone(found: Found) -> None:
    by_utc = {start.hour for start, one, _ in found["press"] if (one.expected or 0) > 50}

    assert by_utc == {6, 7}  # before the clocks change, and after
    assert CLOCKS_CHANGE not in {one.date() for one in flagged(found, "press")}


def test_an_idle_weekday_is_unusual_and_an_idle_weekend_is_not(
    found: Found,
) -> None:
    by_weekday = [start for start, one, _ in found["office"] if one.baseline == "weekday"]
    unusual = [one for one in flagged(found, "office") if one.astimezone(dt.UTC) in by_weekday]

    assert {one.weekday() for one in by_weekday} == set(range(7))
    assert {one.date() for one in unusual} == {FAULTY}
    assert len(unusual) == 12


def test_a_nearly_constant_series_has_small_scores(
    found: Found,
) -> None:
    scores = [one.score for _, one, _ in found["sealed"] if one.score is not None]

    assert 0 < max(scores) < 100  # half a unit over noise of a thousandth
    assert not any(outlier for _, _, outlier in found["unplugged"])


def test_an_unknown_zone_is_refused() -> None:
    for zone in ("Europe/Nowhere", "../UTC", "", "Europe"):
        with pytest.raises(ConfigError, match="there is no time zone") as error:
            History(zone=zone)
        assert "Europe/Berlin" in str(error.value.hint)

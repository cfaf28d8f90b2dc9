"""Each example runs as one command, and its tables are those of plain Python over the same file."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiomqtt
import psycopg
import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from millpy.embedded import EmbeddedBroker
from millpy.testing import GraphDriver

EXAMPLES = Path(__file__).parents[2] / "examples"
HOUR, DAY, MINUTE = timedelta(hours=1), timedelta(days=1), timedelta(minutes=1)
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def test_word_count(database_url: str) -> None:
    found = run("word_count", database_url, "SELECT word, window_start, n FROM word_count.per_minute")

    expected = Counter(
        (word, floor(line["at"], MINUTE))
        for line in data("speech")
        for word in re.findall(r"[a-z]+(?:'[a-z]+)*", line["text"].lower())
    )
    assert {(word, start): n for word, start, n in found} == expected
    assert sum(n for word, _, n in found if word == "the") == 21


def test_bills_are_corrected_by_late_readings_and_days_are_the_sums_of_their_hours(database_url: str) -> None:
    hours = run("billing", database_url, "SELECT customer, window_start, watt_hours, pane_timing FROM billing.hours")
    days = rows(database_url, "SELECT customer, window_start, hours, cents FROM billing.days")
    late = rows(database_url, "SELECT convert_from(payload, 'UTF8')::jsonb->>'id' FROM millpy.late_records")

    readings = {reading["id"]: reading for reading in data("meters") if reading["id"] != "hotel/forgotten"}
    used: defaultdict[tuple[str, datetime], int] = defaultdict(int)
    for reading in readings.values():
        used[reading["customer"], floor(reading["at"], HOUR)] += reading["watt_hours"]
    assert {(customer, start): total for customer, start, total, _ in hours} == used
    assert sum(timing == "late" for *_, timing in hours) > 20
    bills: defaultdict[tuple[str, datetime], list[int]] = defaultdict(list)
    for (customer, start), total in used.items():
        bills[customer, floor(start, DAY)].append(round(total * (32 if 6 <= start.hour < 22 else 21) / 1000))
    assert {(customer, day): (n, cents) for customer, day, n, cents in days} == {
        of: (len(cents), sum(cents)) for of, cents in bills.items()
    }
    assert late == [("hotel/forgotten",)]


def test_sessions_of_phones(database_url: str) -> None:
    found = run("phones", database_url, "SELECT phone, window_start, window_end, taps, first_app FROM phones.sessions")

    expected, taps = [], sorted(data("taps"), key=lambda tap: tap["at"])
    for phone in {tap["phone"] for tap in taps}:
        gap = MINUTE if phone == "kiosk" else 5 * MINUTE
        session: list[dict[str, Any]] = []
        for tap in [*(tap for tap in taps if tap["phone"] == phone), None]:
            if session and (tap is None or tap["at"] >= session[-1]["at"] + gap):
                span = session[0]["at"], session[-1]["at"] + gap
                expected.append((phone, *span, len(session), session[0]["app"]))
                session = []
            session += [tap] if tap else []
    assert sorted(found) == sorted(expected)
    assert len(found) >= 18


def test_a_device_on_a_quiet_feed_is_found_offline_and_its_return_too(
    graph_driver: Callable[..., GraphDriver],
) -> None:
    driver = graph_driver(str(EXAMPLES / "offline.py"), now=at(0))
    driver.feed("readings", [{"device": "pump", "at": at(0)}, {"device": "fan", "at": at(1)}])

    driver.advance_clock(9 * MINUTE)
    assert driver.rows("changes") == []
    driver.advance_clock(3 * MINUTE)  # nobody has sent anything
    assert sorted(changes(driver)) == [("fan", "silent", at(1)), ("pump", "silent", at(0))]

    driver.feed("readings", [{"device": "pump", "at": at(800)}, {"device": "pump", "at": at(5)}])
    assert changes(driver)[-1] == ("pump", "back", at(800))
    driver.advance_clock(30 * MINUTE)
    assert sorted(changes(driver)) == [
        ("fan", "silent", at(1)),
        ("pump", "back", at(800)),
        ("pump", "silent", at(0)),
        ("pump", "silent", at(800)),
    ]


def test_doors_with_an_alarm_and_doors_that_stay_open_are_found(graph_driver: Callable[..., GraphDriver]) -> None:
    driver = graph_driver(str(EXAMPLES / "door_alarm.py"), now=at(0))
    kinds = {0: "open", 30: "alarm", 40: "closed", 100: "open", 120: "reset", 130: "alarm"}
    driver.feed("events", [{"site": "north", "at": at(second), "kind": kind} for second, kind in kinds.items()])

    driver.advance_clock(5 * MINUTE)
    assert [(row["door_at"], row["alarm_at"]) for row in driver.rows("alarms")] == [(at(0), at(30))]
    assert driver.rows("left_open") == []
    driver.advance_clock(15 * MINUTE)
    assert [row["door_at"] for row in driver.rows("left_open")] == [at(100)]


def test_averages_leave_for_the_other_topic_once_their_window_is_over(
    graph_driver: Callable[..., GraphDriver],
) -> None:
    driver = graph_driver(str(EXAMPLES / "kafka_averages.py"), now=at(0))
    for place, temperature in enumerate((10.0, 20.0)):
        record = {"device": "a", "at": at(place), "temperature": temperature}
        driver.feed("readings", [record], partition="readings/0")

    assert driver.sent("to_averages") == []
    driver.advance_clock(MINUTE)
    ((key, value),) = driver.sent("to_averages")
    average = json.loads(value)
    assert (key, average["n"], average["mean"], average["high"]) == (b"a", 2, 15.0, 20.0)


def test_topics_are_in_the_table_every_ten_seconds_before_their_hour_is_over(
    graph_driver: Callable[..., GraphDriver],
) -> None:
    driver = graph_driver(str(EXAMPLES / "trending.py"), now=at(0))
    driver.feed("posts", [{"at": at(1), "text": "#Rain again, #rain"}, {"at": at(2), "text": "#sun and #rain"}])

    assert driver.rows("hourly") == []
    driver.advance_clock(timedelta(seconds=10))
    assert trends(driver) == [("rain", 2, "early"), ("sun", 1, "early")]
    driver.feed("posts", [{"at": at(11), "text": "#sun"}])
    driver.feed("posts", [{"at": at(12), "text": "#sun #wind"}])
    driver.advance_clock(timedelta(seconds=10))
    assert trends(driver) == [("rain", 2, "early"), ("sun", 3, "early"), ("wind", 1, "early")]
    driver.feed("posts", [{"at": at(20), "text": "#wind"}])
    driver.advance_watermark("posts", at(3600))
    assert trends(driver) == [("rain", 2, "early"), ("sun", 3, "early"), ("wind", 2, "on_time")]


def test_readings_get_the_hall_of_their_device_from_a_table(database_url: str) -> None:
    make_registry(database_url)
    found = run("registry", database_url, "SELECT hall, window_start, readings, hottest FROM machines.halls")
    letters = rows(database_url, "SELECT DISTINCT reason, key FROM millpy.dead_letters")

    of = {"boiler": "north", "chiller": "north", "compressor": "south", "press": "south"}
    expected: defaultdict[tuple[str, datetime], list[float]] = defaultdict(list)
    for reading in data("machines"):
        if reading["device"] in of:
            expected[of[reading["device"]], floor(reading["at"], HOUR)].append(reading["temperature"])
    assert {(hall, start): (n, most) for hall, start, n, most in found} == {
        name: (len(values), max(values)) for name, values in expected.items()
    }
    assert letters == [("no_row", '"unlisted"')]


def test_thresholds_are_rows_of_a_table(graph_driver: Callable[..., GraphDriver]) -> None:
    driver = graph_driver(str(EXAMPLES / "thresholds.py"))
    names = ("name", "device", "above")
    rules: list[tuple[str, str | None, float]] = [("overheated", None, 90.0), ("warm chiller", "chiller", 12.0)]
    readings = data("machines")
    expected = []
    for part in (readings[:120], readings[120:]):
        driver.set_table("plant_registry.thresholds", [dict(zip(names, rule, strict=True)) for rule in rules])
        driver.feed("readings", part)
        expected += [
            (rule, reading["device"], reading["at"], reading["temperature"])
            for reading in part
            for rule, device, above in rules
            if device in (None, reading["device"]) and reading["temperature"] > above
        ]
        rules[0] = ("overheated", None, 80.0)  # UPDATE plant_registry.thresholds SET above = 80 …
    found = [(row["rule"], row["device"], row["at"], row["temperature"]) for row in driver.rows("alarms")]

    assert sorted(found) == sorted(expected)
    assert {rule for rule, *_ in found} == {"overheated", "warm chiller"}


def make_registry(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for _ in range(2):  # a second time it changes nothing
            connection.execute((EXAMPLES / "data/registry.sql").read_bytes())


async def test_an_actuator_obeys_each_command_once_through_kills_and_repeats(
    database_url: str, broker: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLPY_MQTT_URL", f"mqtt://127.0.0.1:{broker.port}")
    expected: defaultdict[str, list[bool]] = defaultdict(list)
    for level in data("levels"):
        is_open = bool(expected[level["tank"]]) and expected[level["tank"]][-1]
        if (level["liters"] < 200) != is_open and (not is_open or level["liters"] > 800):
            expected[level["tank"]].append(not is_open)
    moves = Moves(tmp_path)
    async with aiomqtt.Client("127.0.0.1", broker.port, protocol=aiomqtt.ProtocolVersion.V5) as client:
        await client.subscribe("valves/+", qos=1)
        async with moves.running():
            await asyncio.to_thread(run, "valves", database_url, "SELECT 1")
            count = sum(map(len, expected.values()))
            messages = [await anext(client.messages) for _ in range(count)]
            for message in messages:  # what a crash repeats
                await client.publish(message.topic.value, message.payload, qos=1, properties=again(message))
            await client.publish("valves/last", messages[0].payload, qos=1, properties=again(messages[0]))
            await moves.until("valves/last")
        async with moves.running():  # gets what is retained
            await client.publish("valves/end", messages[0].payload, qos=1, properties=again(messages[0]))
            await moves.until("valves/end")
    assert count > 10
    for tank, positions in expected.items():
        words = [f"valves/{tank} {'opens' if is_open else 'closes'}" for is_open in positions]
        assert [move for move in moves.made if move.startswith(f"valves/{tank} ")] == words


class Moves:
    """What the actuator has done, through its restarts."""

    def __init__(self, place: Path) -> None:
        self.made: list[str] = []
        self._command = [sys.executable, str(EXAMPLES / "valve.py"), str(place / "positions.json")]
        self._news = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the actuator; kill it at the end."""
        process = await asyncio.create_subprocess_exec(*self._command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        reading = asyncio.create_task(self._read(process.stdout))
        try:
            yield
        finally:
            process.kill()
            await process.wait()
            await reading

    async def _read(self, lines: asyncio.StreamReader) -> None:
        async for line in lines:
            self.made.append(line.decode().strip())
            self._news.set()

    async def until(self, topic: str) -> None:
        async with asyncio.timeout(30):
            while not self.made or not self.made[-1].startswith(topic):
                self._news.clear()
                await self._news.wait()


def again(message: aiomqtt.Message) -> Properties:
    """The properties of a message that comes again."""
    found = Properties(PacketTypes.PUBLISH)
    found.UserProperty = message.properties.UserProperty  # type: ignore[union-attr]
    return found


def run(example: str, url: str, query: str) -> list[tuple[Any, ...]]:
    """Run an example as its docstring says; return the rows of a query."""
    command = [sys.executable, "-m", "millpy", "run", f"examples/{example}.py", "--database", url]
    done = subprocess.run(command, cwd=EXAMPLES.parent, check=False, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows(url, "SELECT consumer FROM millpy.accounting WHERE NOT balanced") == []
    return rows(url, query)


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        connection.execute("SET timezone = 'UTC'")
        return connection.execute(query).fetchall()  # type: ignore[call-overload]


def data(name: str) -> list[dict[str, Any]]:
    """The records of an example's file, as plain Python reads them."""
    records = [json.loads(line) for line in (EXAMPLES / f"data/{name}.ndjson").read_text().splitlines()]
    return [record | {"at": datetime.fromisoformat(record["at"])} for record in records]


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def floor(moment: datetime, size: timedelta) -> datetime:
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    return epoch + (moment - epoch) // size * size


def trends(driver: GraphDriver) -> list[tuple[str, int, str]]:
    return sorted((row["topic"], row["n"], row["pane_timing"]) for row in driver.rows("hourly"))


def changes(driver: GraphDriver) -> list[tuple[str, str, datetime]]:
    return [(row["device"], row["state"], row["since"]) for row in driver.rows("changes")]

"""The devices of the plant and what they measure in a day: a function of the options, the same in every process.

Times are event times in whole seconds since the epoch. Values are quarters, so that sums of floats are exact in any
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from zoneinfo import ZoneInfo

TICK_S = 300
"""Gateways send what they have collected in this time; the publisher waits for the broker at each end of it."""
DAY_S = 86_400
TICKS = DAY_S // TICK_S
HOUR = 3_600
CLOSES_S = 3 * HOUR
"""How far behind the day the readings are that close its windows."""
BERLIN = ZoneInfo("Europe/Berlin")
SINGLE = ("zigbee", "tasmota", "shelly", "chirpstack", "tts")
"""Dialects whose messages have one reading."""
BATCHED = ("telegraf", "line", "opcua", "csv", "msgpack", "cbor", "gateway")
DIALECTS = (*SINGLE, *BATCHED)
DEVICES_OF_GATEWAY = 10
HALL_SHARE = 4
"""One of this number of zigbee devices stands in the new hall."""
BAD_SHARE = 5
"""One of this number of tts devices gets the bad firmware."""
BAD_NTH = 5
"""One of this number of its readings is right: some windows have a row before the others are corrected, some none."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device; `gateway` collects its readings if its dialect is batched."""

    name: str
    dialect: str
    gateway: str
    number: int
    place: str = "hall1"


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement. `bad` is what a bad firmware made of it."""

    device: Device
    at: int
    value: float
    bad: bool = False


@dataclass(frozen=True)
class Options:
    """What decides the day.

    Attributes:
        devices: the number of devices.
        every_s: the time between two readings of a device.
        start: the beginning of the day, in seconds since the epoch.
        with_hall: whether a new hall begins to send in the afternoon.
    """

    devices: int = 3_000
    every_s: int = 600
    start: int = 0
    with_hall: bool = False

    @cached_property
    def fleet(self) -> tuple[Device, ...]:
        """All devices, the new hall's included."""
        return tuple(_device(number, self.with_hall) for number in range(self.devices))


OFFLINE_FROM, OFFLINE_UNTIL = 2 * HOUR, 22 * HOUR
BAD_FROM, BAD_UNTIL = 10 * HOUR, 12 * HOUR
HALL_FROM = 13 * HOUR
OFFLINE_GATEWAY = "gateway-00"


def a_day_before(now: datetime) -> int:
    """Return the beginning of a day that is over with all that closes it, and in which no clock in Berlin changes."""
    start = (now - timedelta(seconds=DAY_S + CLOSES_S + HOUR)).replace(minute=0, second=0, microsecond=0)
    while len({(start + timedelta(hours=hours)).astimezone(BERLIN).utcoffset() for hours in (-24, 48)}) > 1:
        start -= timedelta(days=7)
    return int(start.timestamp())


def _device(number: int, with_hall: bool) -> Device:
    dialect, index = DIALECTS[number % len(DIALECTS)], number // len(DIALECTS)
    in_hall = with_hall and dialect == "zigbee" and index % HALL_SHARE == 1
    gateway = f"{dialect}-{index // DEVICES_OF_GATEWAY:02}"
    return Device(f"{dialect}-{number:05}", dialect, gateway, number, "hall2" if in_hall else "hall1")


def readings_of(device: Device, options: Options) -> Iterator[Reading]:
    """Yield what a device measures in the day, in order."""
    begin = HALL_FROM if device.place == "hall2" else 0
    phase = device.number * 7_919 % options.every_s
    has_bad_firmware = device.dialect == "tts" and device.number // len(DIALECTS) % BAD_SHARE == 0
    for nth, second in enumerate(range(phase, DAY_S, options.every_s)):
        if second >= begin:
            value = ((device.number * 131 + nth * 37) % 400 - 80) / 4
            bad = has_bad_firmware and BAD_FROM <= second < BAD_UNTIL and nth % BAD_NTH != 0
            yield Reading(device, options.start + second, value, bad)


def is_buffered(reading: Reading, options: Options) -> bool:
    """Tell whether a reading waits in the gateway that is offline."""
    return reading.device.gateway == OFFLINE_GATEWAY and OFFLINE_FROM <= reading.at - options.start < OFFLINE_UNTIL


def schedule(options: Options) -> list[list[Reading]]:
    """Return, for each tick, what is sent at its end, by device and time."""
    ticks: list[list[Reading]] = [[] for _ in range(TICKS)]
    for device in options.fleet:
        for reading in readings_of(device, options):
            second = OFFLINE_UNTIL if is_buffered(reading, options) else reading.at - options.start
            ticks[second // TICK_S].append(reading)
    for tick in ticks:
        tick.sort(key=lambda reading: reading.at)
    return ticks


def first_bad_tick(options: Options) -> int:
    """Return the tick at whose end the first reading of a bad firmware is sent."""
    devices = [device for device in options.fleet if device.dialect == "tts"]
    bad = [reading.at for device in devices for reading in readings_of(device, options) if reading.bad]
    return (min(bad) - options.start) // TICK_S


def closers(options: Options) -> list[Reading]:
    """Return the readings whose event time closes all windows of the day: one for each source partition."""
    found: dict[tuple[str, str], Device] = {}
    for device in options.fleet:
        found.setdefault((device.dialect, device.place), device)
    return [Reading(device, options.start + DAY_S + CLOSES_S, 0.0) for device in found.values()]


def describe(second: int) -> str:
    """Return a time as RFC 3339 in UTC."""
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

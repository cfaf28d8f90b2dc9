"""The input of the crash tests and its expected results, computed from the lines by a plain loop."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

START_US = 1_700_000_000_000_000
STEP_US = 5_000
DEVICES = 40
GROUPS = 7
DISORDER_US = 500_000
LATENESS_US = 300_000
WINDOW_US = 2_000_000
GROUP_WINDOW_US = 10_000_000
EVERY = 10
QUIET_US = 1_000_000
PERIOD_US = 10_000_000


def write_input(path: Path, records: int = 20_000, seed: int = 7) -> Path:
    """NDJSON in order of arrival: a tenth delayed, devices that fall silent, one in a hundred doubled, some rubbish."""
    rng = random.Random(seed)
    lines: list[tuple[float, str]] = []
    for number in range(records):
        at_us = START_US + number * STEP_US
        device = rng.randrange(DEVICES)
        if (number * STEP_US // 5_000_000 + device) % 4 == 0:
            device = (device + 1) % DEVICES
        delay = rng.expovariate(1 / 300_000) if rng.random() < 0.1 else 0.0
        reading = {
            "device": f"d{device}",
            "group": device % GROUPS,
            "seq": number,
            "at": datetime.fromtimestamp(at_us / 1e6, UTC).isoformat(),
            "value": float(rng.randrange(-500, 500)),
        }
        line = json.dumps(reading)
        lines.append((at_us + delay, line))
        if rng.random() < 0.01:
            lines.append((at_us + delay + rng.uniform(1, 1_000_000), line))
        if rng.random() < 0.001:
            lines.append((at_us + delay, line[:20]))
    lines.sort(key=lambda entry: entry[0])
    path.write_text("".join(line + "\n" for _, line in lines))
    return path


@dataclass
class Expected:
    """The expected final content of all tables."""

    injected: int = 0
    duplicates: int = 0
    dead_letters: int = 0
    windows: dict[tuple[str, int], tuple[int, float, float, float, int]] = field(default_factory=dict)
    """(device, window start) -> n, total, low, high, late count."""
    late_records: Counter[tuple[str, int]] = field(default_factory=Counter)
    marks: Counter[tuple[str, int, str, int, float, int]] = field(default_factory=Counter)
    per_group: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    totals: Counter[tuple[int, int, int]] = field(default_factory=Counter)


@dataclass
class _Device:
    group: int = 0
    number: int = 0
    total: float = 0.0
    last_us: int = 0
    timer_us: int | None = None


def expected_of(path: Path) -> Expected:
    """Replay the lines one by one."""
    expected = Expected()
    seen: dict[int, int] = {}
    devices: dict[str, _Device] = {}
    newest: int | None = None
    for line in path.read_text().splitlines():
        expected.injected += 1
        try:
            reading = json.loads(line)
        except ValueError:
            expected.dead_letters += 1
            continue
        at_us = round(datetime.fromisoformat(reading["at"]).timestamp() * 1e6)
        clock = max(newest or 0, at_us)
        if reading["seq"] in seen and seen[reading["seq"]] >= clock - 5_000_000:
            seen[reading["seq"]] = clock
            expected.duplicates += 1
            continue
        seen[reading["seq"]] = clock
        watermark = -(2**62) if newest is None else newest - DISORDER_US
        newest = clock
        _into_window(expected, reading, at_us, watermark)
        _watch(expected, devices.setdefault(reading["device"], _Device()), reading, at_us, watermark)
    for name, device in devices.items():
        if device.timer_us is not None:
            _fire(expected, name, device)
    _group(expected)
    return expected


def _into_window(expected: Expected, reading: dict, at_us: int, watermark: int) -> None:
    start = at_us - at_us % WINDOW_US
    name = (reading["device"], start)
    if watermark >= start + WINDOW_US + LATENESS_US:
        expected.late_records[name] += 1
        return
    late = int(watermark >= start + WINDOW_US)
    value = reading["value"]
    n, total, low, high, late_count = expected.windows.get(name, (0, 0.0, value, value, 0))
    expected.windows[name] = (n + 1, total + value, min(low, value), max(high, value), late_count + late)


def _watch(expected: Expected, device: _Device, reading: dict, at_us: int, watermark: int) -> None:
    if device.timer_us is not None and device.timer_us <= watermark:
        _fire(expected, reading["device"], device)
    device.group = reading["group"]
    device.number += 1
    device.total += reading["value"]
    device.last_us = max(device.last_us, at_us)
    if device.number % EVERY == 0:
        expected.marks[(reading["device"], device.group, "every", device.number, device.total, at_us)] += 1
    if at_us >= watermark:
        device.timer_us = device.last_us + QUIET_US


def _fire(expected: Expected, name: str, device: _Device) -> None:
    assert device.timer_us is not None
    expected.marks[(name, device.group, "quiet", device.number, device.total, device.timer_us)] += 1
    device.timer_us = None


def _group(expected: Expected) -> None:
    periods: Counter[tuple[int, int]] = Counter()
    for (_, group, _, number, _, at_us), times in expected.marks.items():
        assert times == 1
        name = (group, at_us - at_us % GROUP_WINDOW_US)
        n, total = expected.per_group.get(name, (0, 0))
        expected.per_group[name] = (n + 1, total + number)
        periods[group, at_us // PERIOD_US] += 1
    for (group, period), marks in periods.items():
        expected.totals[group, period, marks] += 1

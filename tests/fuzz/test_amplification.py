"""Small inputs cost little: memory and CPU of each reader are bounded by the bytes that it is given, and a constant.

Each format is read in a process of its own (`cost.py`), so that its peak can be measured and a failure hurts nobody.
`make fuzz` tries other inputs for FUZZ_MINUTES.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.amplifiers import FORMATS, described

MINUTES = float(os.environ.get("FUZZ_MINUTES", "0"))
ROOT = Path(__file__).parents[2]
PEAK_KB, PEAK_KB_PER_KB = 450_000, 200
CPU_S, CPU_S_PER_MB, CPU_S_PER_ROW = 8.0, 10.0, 1e-4
ROWS, ROWS_PER_BYTE = 1_000_000, 4_000
INPUTS = 3
"""Of a format, in the short form."""


def costs_of(directory: Path, name: str, seeds: range) -> dict[str, dict[str, Any]]:
    """What reading inputs of a format costs, by file."""
    kind, suffix, generate = FORMATS[name]
    arguments = []
    for seed in seeds:
        path = directory / f"{seed}.{suffix}"
        path.write_bytes(generate(random.Random(f"{name} {seed}")))
        arguments.append(f"{kind}:{path}")
    command = [sys.executable, "-m", "tests.fuzz.cost", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = {cost["file"]: cost for cost in map(json.loads, done.stdout.splitlines())}
    ended = f"the reader ended ({done.returncode}) {done.stderr[-300:]}"
    lost = {path.rpartition("/")[2]: {"error": ended} for path in arguments}
    first_lost = [file for file in lost if file not in found][:1]
    return {**found, **{file: lost[file] for file in first_lost}}


def faults(cost: dict[str, Any], size: int) -> list[str]:
    """The memory that an input of this size must not exceed."""
    if cost["error"]:
        return [cost["error"]]
    found = []
    if cost["peak_kb"] > PEAK_KB + PEAK_KB_PER_KB * size / 1e3:
        found.append(f"{cost['peak_kb'] / 1e3:.0f} MB")
    if cost["cpu_s"] > CPU_S + CPU_S_PER_MB * size / 1e6 + CPU_S_PER_ROW * cost["rows"]:
        found.append(f"{cost['cpu_s']:.1f} s")
    if cost["rows"] > ROWS + ROWS_PER_BYTE * size:
        found.append(f"{cost['rows']} rows")
    return found


@pytest.mark.timeout(MINUTES * 60 + 600)
@pytest.mark.parametrize("name", FORMATS)
def test_cost_of_an_input_is_proportional_to_its_bytes(tmp_path: Path, name: str) -> None:
    until = time.monotonic() + MINUTES * 60 / len(FORMATS)
    first = random.randrange(10**6) if MINUTES else 0
    while True:
        seeds = range(first, first + INPUTS)
        for file, cost in costs_of(tmp_path, name, seeds).items():
            data = (tmp_path / file).read_bytes()
            assert not faults(cost, len(data)), f"{name} {file}: {len(data)} bytes {described(data)} cost {cost}"
        first += INPUTS
        if time.monotonic() >= until:
            return

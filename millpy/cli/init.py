"""`millpy init`: write an example project that runs."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import FULL, JsonOption, handle_errors, print_json
from millpy.errors import UsageError

DEVICES = {"boiler": 61.0, "hall": 21.5, "cellar": 12.0}
BEGIN = datetime(2026, 11, 1, 8, 0, tzinfo=UTC)
MINUTES = 10
EVERY_S = 5


@handle_errors
def init(
    directory: Annotated[
        Path,
        typer.Argument(metavar="[DIRECTORY]", help="Directory of the project; created if missing.", show_default=False),
    ] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Write an example project: a commented graph, readings for it, and a README with commands to try.

    Existing files are never overwritten.
    """
    project = contents()
    there = [name for name in project if (directory / name).exists()]
    if there:
        raise UsageError(f"{directory / there[0]} already exists", hint="give a new directory: millpy init example")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in project.items():
            with (directory / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise UsageError(f"cannot write {error.filename}: {error.strerror}", hint="give another directory") from error
    if as_json:
        print_json({"directory": directory, "wrote": list(project)})
        return
    tables.say(f"wrote {', '.join(str(directory / name) for name in project)}\n")
    tables.say("next:" + ("" if directory == Path() else f" cd {directory}, then"))
    tables.say("  millpy run        reads the readings to their end")
    tables.say("  millpy windows    shows the table that it wrote")


def contents() -> Mapping[str, str]:
    """Return the files of the project, by name."""
    kept = files("millpy.cli") / "project"
    return {
        "graph.py": (kept / "graph.py.txt").read_text(encoding="utf-8"),
        "readings.ndjson": "".join(line + "\n" for line in readings()),
        "README.md": (kept / "README.md").read_text(encoding="utf-8"),
        ".gitignore": ".millpy/\n",
    }


def readings() -> Iterator[str]:
    """Yield lines of JSON: out of order, some sent twice, one broken, one late and one too late for its window."""
    rng = random.Random(2010)
    sent: list[tuple[float, str]] = []
    for number in range(MINUTES * 60 // EVERY_S * len(DEVICES)):
        device, usual = list(DEVICES.items())[number % len(DEVICES)]
        second = number // len(DEVICES) * EVERY_S
        arrives = second + rng.uniform(0, 8)
        line = _line(number, device, second, usual + rng.gauss(0, 0.8))
        sent.append((arrives, line))
        if number % 40 == 7:
            sent.append((arrives + 2, line))
    sent.append((330.5, '{"id": "r0230", "device": "hall", "at": "2026-11-01T08:05:'))
    sent.append((205.5, _line(9998, "boiler", 152, 64.2)))
    sent.append((500.5, _line(9999, "hall", 65, 22.0)))
    return (line for _, line in sorted(sent))


def _line(number: int, device: str, second: int, temperature: float) -> str:
    at = (BEGIN + timedelta(seconds=second)).isoformat().replace("+00:00", "Z")
    reading = {"id": f"r{number:04}", "device": device, "at": at, "temperature": round(temperature, 2)}
    return json.dumps(reading)

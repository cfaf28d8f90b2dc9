"""Parts that the embedded servers share: their directory, a free port, a time limit for a start, the end of a log."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

EMBEDDED_DIRECTORY = ".millpy"
START_S_MAX = 60
PORTS_TRIED_MAX = 100
_PORTS = 15_000, 32_000
"""Ports below those that Linux and other systems assign to outgoing connections."""


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1.

    The system does not assign it to an outgoing connection either, so it is still free when a killed server restarts.
    """
    for _ in range(PORTS_TRIED_MAX):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(*_PORTS)))
            return int(probe.getsockname()[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # raises the reason
        return int(probe.getsockname()[1])


def last_lines(text: str, count: int = 3) -> str:
    """Return the last lines of a program's output, joined into one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-count:])


def embedded_directory(graph_location: str | None) -> Path:
    """Return the directory of a graph's embedded server: in `.millpy/` beside its file, or in the current directory."""
    beside = Path(graph_location.partition(":")[0]).parent if graph_location else Path()
    return beside / EMBEDDED_DIRECTORY / "postgres"

"""What the embedded servers share: a free port, how long they may take, and the end of a log."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

START_S_MAX = 60
PORTS_TRIED_MAX = 100
_PORTS = 15_000, 32_000
"""Below those that Linux and others give to outgoing connections."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens at.

    The system gives it to no outgoing connection either: it is still free when a server that was killed comes back.
    """
    for _ in range(PORTS_TRIED_MAX):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(*_PORTS)))
            return int(probe.getsockname()[1])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # raises what is wrong
        return int(probe.getsockname()[1])


def last_lines(text: str, count: int = 3) -> str:
    """The end of what a program has said, on one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-count:])

"""What the embedded servers share: a free port, how long they may take, and the end of a log."""

from __future__ import annotations

import socket

START_S_MAX = 60


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def last_lines(text: str, count: int = 3) -> str:
    """The end of what a program has said, on one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-count:])

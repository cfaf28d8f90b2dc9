"""The states of processes."""

from __future__ import annotations

from pathlib import Path


def state_of(pid: int) -> str:
    """Return the state of a process, as `ps` shows it. Raises FileNotFoundError or ProcessLookupError."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, even if its status was not collected."""
    try:
        return state_of(pid) == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True

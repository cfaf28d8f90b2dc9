"""What a test asks about processes that are not its children."""

from __future__ import annotations

from pathlib import Path


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, even if its status was not collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True

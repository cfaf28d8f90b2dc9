"""Resident memory of a process, now and at its highest, in MB (10**6 bytes)."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def peak_rss_mb(pid: int | None = None) -> float:
    """Return the kernel's high-water mark (Linux), or elsewhere the present memory."""
    status = Path(f"/proc/{pid or os.getpid()}/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    return rss_mb(pid or os.getpid())


def rss_mb(pid: int) -> float:
    """Return the present memory."""
    return float(psutil.Process(pid).memory_info().rss) / 1e6

"""Whose cancellation an error is: that of this task, or that of what it awaits, which may be somebody else's code."""

from __future__ import annotations

import asyncio


def is_cancelled() -> bool:
    """Tell whether the current task is to end."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

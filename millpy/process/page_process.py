"""The page as a child process of a run or a demonstration. When it fails, or is killed, the run notices nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from millpy.config.secrets import FILE
from millpy.config.settings import DATABASE_URL

STOP_S_MAX = 10.0


@contextmanager
def page_beside(url: str, *arguments: str, left_out: Collection[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Run `millpy ui` for the block; it prints its address.

    It has a process group of its own, so that Ctrl-C reaches only the run, which ends it.

    Args:
        url: the database.
        arguments: further arguments of `millpy ui`.
        left_out: variables of this process that it does not get.
    """
    hidden = {DATABASE_URL + FILE, *left_out}
    given = {name: value for name, value in os.environ.items() if name not in hidden} | {DATABASE_URL: url}
    command = [sys.executable, "-m", "millpy", "ui", "--leash", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2, env=given, process_group=0)
    try:
        yield child
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

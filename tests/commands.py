"""The command line within the test's process: what a command prints, and how it ends."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from millpy.cli.app import app, main


@contextmanager
def logging_as_it_was() -> Iterator[None]:
    """Restore logging, which a command configures for its own process."""
    root, ours = logging.getLogger(), logging.getLogger("millpy")
    before = root.handlers[:], root.level, ours.level
    try:
        yield
    finally:
        root.handlers[:], root.level, ours.level = before


def millpy(*arguments: str, status: int = 0) -> str:
    """Return the output of the command, or its standard error if it must fail."""
    with logging_as_it_was():
        done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, (done.stdout, done.stderr, done.exception)
    return done.stderr if status else done.stdout


def run_millpy(*arguments: str) -> tuple[int, str]:
    """Exit status and standard error of a command, as the program `millpy` has them."""
    with logging_as_it_was(), CliRunner().isolation() as streams, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["millpy", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stderr.flush()
        return int(ended.value.code or 0), streams[1].getvalue().decode()


def millpy_json(*arguments: str) -> Any:
    """Return the output of the command with --json."""
    return json.loads(millpy(*arguments, "--json"))

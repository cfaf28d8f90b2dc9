"""What devices and other people write acts on no terminal and begins no line of the log."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from _pytest.logging import LogCaptureHandler
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from millpy.cli import doctor
from millpy.cli.app import app
from millpy.cli.text_table import continued, fitted, say, table
from millpy.config.escape import visible, visible_lines
from millpy.config.settings import Settings, configure_logging
from millpy.errors import UsageError
from millpy.model.finding import Finding, Severity
from millpy.process.exit import report_error

COMMANDS = Path(__file__).resolve().parents[2] / "millpy" / "cli"
HOSTILE = {
    "clears the screen": "\x1b[2J\x1b[H",
    "sets the title": "\x1b]0;mine\x07",
    "C1 control": "\x9b2J",
    "goes back": "abc\rx",
    "erases": "abc\b\b\x7f",
    "begins a line": "a\n2026-11-22T00:00:00Z [error    ] forged [millpy.runtime.worker]",
    "line separators": "a\u2028b\u2029c\x85d\x0be\x0cf",
    "turns the direction": "\u202egnp.exe\u202c \u2066x\u2069 \u061c\u200f",
    "hides": "a\u200b\u2060\ufeff\u00adb\U000e0041",
    "lone surrogate": "\udc9b",
    "NUL": "a\x00b",
}
NOT_STORED = {"lone surrogate", "NUL"}
"""Not by PostgreSQL."""


@pytest.fixture(params=HOSTILE)
def hostile(request: pytest.FixtureRequest) -> str:
    return HOSTILE[request.param]


def harmless(text: str) -> bool:
    return all(line.isprintable() for line in text.split("\n"))


@given(st.text(st.characters()))
def test_control_characters_are_removed_and_visible_ones_kept(text: str) -> None:
    shown = visible(text)

    assert shown.isprintable()
    assert [c for c in text if c.isprintable()] == [c for c in text if c in shown and c.isprintable()]
    if text.isprintable():
        assert shown == text
    assert harmless(visible_lines(text.replace("\t", "")))


@pytest.mark.parametrize("width", [None, 200, 20])
def test_a_row_of_a_table_stays_on_one_line(hostile: str, width: int | None) -> None:
    rows = [{"device": hostile, hostile: 1, "list": [hostile], "map": {hostile: hostile}} for _ in range(3)]

    text = table(rows) if width is None else fitted(rows, width)

    assert harmless(text)
    if width is None or width > 100:
        assert text.count("\n") == 4
    assert harmless(continued(rows, [])[0])


@pytest.mark.parametrize("severity", Severity)
def test_a_finding_cannot_inject_lines_or_colors(
    hostile: str, severity: Severity, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)

    doctor._print(Finding(severity, "check", f"found {hostile}", f"means {hostile}", f"do {hostile}"))

    said = capfd.readouterr().out
    assert harmless(said)
    first, *rest = said.splitlines()
    assert first == f"{severity.value:<8}check: found {visible(hostile)}"
    assert all(line.startswith(" " * doctor.INDENT) for line in rest)


def test_output_of_commands_cannot_control_a_terminal(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    say(f"  {hostile}")
    report_error(UsageError(f"no {hostile}", hint=f"not {hostile}"))

    said = capsys.readouterr()
    assert harmless(said.out)
    assert harmless(said.err)
    assert said.err.count("\n") == 2


def test_an_error_in_json_is_exact(hostile: str, capsys: pytest.CaptureFixture[str]) -> None:
    report_error(UsageError(hostile, hint=hostile), as_json=True)

    text = capsys.readouterr().err
    assert text.isascii() and harmless(text)
    assert json.loads(text)["error"]["message"] == hostile


@pytest.fixture(params=["console", "json"])
def log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, io.StringIO]]:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    configure_logging(Settings(log_format=request.param))
    yield request.param, stream


def test_input_cannot_forge_a_line_of_the_log(
    log: tuple[str, io.StringIO], hostile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, stream = log
    # What pytest itself captures goes into its report, and pytest-xdist cannot send one with a lone surrogate.
    ours = [handler for handler in logging.getLogger().handlers if not isinstance(handler, LogCaptureHandler)]
    monkeypatch.setattr(logging.getLogger(), "handlers", ours)

    logging.getLogger("millpy.test").warning("device %s", hostile, extra={"key": hostile, "more": [hostile]})
    structlog.get_logger("millpy.test").error(hostile, key=hostile, more={hostile: 1})
    try:
        raise ValueError(hostile)
    except ValueError:
        logging.getLogger("millpy.test").exception("it failed: %s", hostile)

    lines = stream.getvalue().rstrip("\n").split("\n")
    assert all(line.isprintable() for line in lines), lines
    begun = [line for line in lines if line and not line.startswith(" ")]
    assert len(begun) == 3, begun
    if form == "json":
        assert json.loads(begun[0])["key"] == hostile


def test_commands_print_by_one_function_that_escapes() -> None:
    found = []
    for path in COMMANDS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("typer.echo", "print", "typer.secho"):
                found.append((path.name, ast.unparse(node)))

    exact = ("json.dumps", "document(found)", "json_text(")  # ASCII
    assert [words for name, words in found if not any(word in words for word in exact)] == [
        "typer.echo(head + visible_lines(text))"
    ]


@pytest.mark.parametrize("hostile", sorted(HOSTILE.keys() - NOT_STORED), indirect=True)
def test_sql_shows_sent_data_escaped_and_json_exactly(hostile: str, database_url: str) -> None:
    escaped = "".join(f"\\+{ord(c):06x}" for c in hostile)
    question = ["sql", f"SELECT U&'{escaped}' AS sent, ARRAY[U&'{escaped}'] AS several", "--database", database_url]

    shown = CliRunner().invoke(app, question)
    exact = CliRunner().invoke(app, [*question, "--json"])

    assert shown.exit_code == 0, shown.output
    assert harmless(shown.output)
    assert json.loads(exact.stdout)[0]["sent"] == hostile

"""What `--help` prints of each command."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from millpy.cli.app import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text()


def commands_of(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the command, or those of the group, with their names."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for own, one in command.commands.items():
        yield from commands_of(one, f"{name} {own}".strip())


COMMANDS = dict(commands_of(get_command(app), ""))
each_command = pytest.mark.parametrize("name", COMMANDS)


@each_command
def test_paragraphs_are_broken_by_the_terminal_only(name: str) -> None:
    paragraphs = COMMANDS[name].help.split("\n\n")

    assert [paragraph for paragraph in paragraphs if "\n" in paragraph.strip()] == []


@each_command
def test_every_option_says_what_it_does(name: str) -> None:
    shown = [parameter for parameter in COMMANDS[name].params if not getattr(parameter, "hidden", False)]

    silent = [one.opts for one in shown if one.param_type_name == "option" and not one.help]
    assert silent == []


@each_command
def test_command_is_on_its_page(name: str) -> None:
    assert f"`{name}" in PAGE or f"`{name.split()[0]}`" in PAGE


@pytest.mark.parametrize("service", ["worker", "injector", "archiver", "migrate"])
def test_service_shows_its_usage_without_a_graph_and_a_database(
    service: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MILLPY_DATABASE_URL", raising=False)
    monkeypatch.setattr(sys, "argv", [service, "--help"])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"services.{service}", run_name="__main__")

    assert ended.value.code == 0
    assert f"python -m services.{service} " in capsys.readouterr().out

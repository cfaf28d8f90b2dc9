"""Commands in the documentation, parsed as their programs would; nothing is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from typing import Any

import typer

from millpy.cli.app import app
from tests.docs.blocks import ROOT

TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
OTHERS = {
    "cat",
    "cd",
    "cp",
    "curl",
    "docker",
    "export",
    "git",
    "kill",
    "ls",
    "mkdir",
    "mosquitto_pub",
    "psql",
    "spark-submit",
}
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
PARTS = {"&&", "||", "|", ";", "&"}


def commands_in(body: str) -> Iterator[str]:
    """The lines after a prompt, with those that go on after a backslash, and those within the same quotes."""
    lines = iter(re.sub(r"\\\n\s*", "", body).splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while is_open(command):
                command += "\n" + next(lines)
            yield command


def is_open(command: str) -> bool:
    """Whether a quotation has no end yet."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return False


def faults_of(command: str) -> Iterator[str]:
    """Yield the faults of a command line: an unknown program, target, extra, option or argument."""
    part: list[str] = []
    for word in [*shlex.split(command, comments=True), ";"]:
        if word not in PARTS:
            part.append(word)
            continue
        while part and ASSIGNMENT.fullmatch(part[0]):
            part.pop(0)
        if part:
            yield from faults_of_one(part)
        part = []


def faults_of_one(words: list[str]) -> Iterator[str]:
    program, *arguments = words
    if program == "millpy":
        yield from faults_of_millpy(arguments)
    elif program == "make":
        yield from (f"make has no target {word}" for word in arguments if "=" not in word and word not in TARGETS)
    elif program == "pip":
        yield from (f"no package index has {word}" for word in arguments if re.match(r"millpy\b", word))
        named = [extra for word in arguments for extra in re.findall(r"\[(.*)\]", word)]
        yield from (
            f"there is no extra {extra}" for extra in ",".join(named).split(",") if extra and extra not in EXTRAS
        )
    elif program in ("python", "python3"):
        yield from (f"there is no {word}" for word in arguments if word.endswith(".py") and not (ROOT / word).is_file())
    elif program not in OTHERS:
        yield f"{program} is a program that tests/docs does not know"


def faults_of_millpy(arguments: list[str]) -> Iterator[str]:
    """The complaint of the command line, if it has one."""
    try:
        parser().main(arguments, prog_name="millpy", standalone_mode=False)
    except Exception as error:  # of click, which typer brings along under a name of its own
        yield f"millpy {' '.join(arguments)}: {getattr(error, 'message', '') or error!r}"


def parser() -> Any:
    """Return the parser of the command line, with all callbacks removed."""
    top: Any = typer.main.get_command(app)
    waiting = [top]
    while waiting:
        command = waiting.pop()
        command.callback = None
        waiting.extend(getattr(command, "commands", {}).values())
    return top


def faults_of_mention(text: str) -> Iterator[str]:
    """Yield the faults of a command within a sentence, where words may be placeholders.

    Its subcommands and options must exist.
    """
    program, *words = text.split()
    if program == "make":
        yield from (
            f"make has no target {word}" for word in words if re.fullmatch("[a-z0-9-]+", word) and word not in TARGETS
        )
        return
    here = parser()
    path = [program]
    while words and hasattr(here, "commands"):
        if words[0] not in here.commands:
            if not words[0].startswith("-") and not words[0].isupper():
                yield f"{' '.join(path)} has no command {words[0]}"
            break
        path.append(words.pop(0))
        here = here.commands[path[-1]]
    known = {option for parameter in here.params for option in parameter.opts} | {"--help"}
    for word in words:
        if word.startswith("-") and word.partition("=")[0].rstrip(",;") not in known:
            yield f"{' '.join(path)} has no option {word}"

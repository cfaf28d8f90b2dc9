"""Code that the commands share: options, error handling, and the output of rows."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from millpy.admin.json_output import json_text
from millpy.admin.queries import Admin, Row
from millpy.cli import text_table as tables
from millpy.config.durations import EXAMPLES, parse_duration
from millpy.config.settings import Settings, configure_logging
from millpy.embedded import NO_SPACE_HINT
from millpy.errors import MillError, StoreUnavailableError, UsageError
from millpy.observability.status_line import working
from millpy.process.exit import report_error

P = ParamSpec("P")
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
REFUSED_HINT = "give another path, or get permission to use this one"
READING_S_MAX = 5.0
"""Seconds; a snapshot that is held longer slows every commit."""
DatabaseOption = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", help="Database to use; default: MILLPY_DATABASE_URL, else the embedded one."
    ),
]
GraphArgument = Annotated[
    str | None,
    typer.Argument(metavar="[GRAPH.py]", help="Graph, by its file or its name.", show_default=False),
]


def duration_s(text: str | float) -> float:
    """Return the seconds of an option: parse text, and keep a default as it is.

    Raises:
        typer.BadParameter: the text is no duration.
    """
    try:
        return parse_duration(text).total_seconds() if isinstance(text, str) else text
    except ValueError as error:
        raise typer.BadParameter(f"{error}; for example {EXAMPLES}") from None


def duration_option(name: str, default: str | None, text: str) -> Any:
    """Return an option that takes a duration, such as `30m`, as seconds; `default` is shown."""
    return typer.Option(name, metavar="DURATION", parser=duration_s, show_default=default or False, help=text)


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; errors are JSON, too.")]


def handle_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Wrap a command: print an expected error in one clear line, never as a traceback, and exit with its status."""

    @functools.wraps(command)
    def inner(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            status = command(*args, **kwargs) or 0
            sys.stdout.flush()  # output that cannot be written fails here
        except MillError as error:
            status = report_error(error, as_json=as_json)
        except UnicodeEncodeError as error:  # Python could not decode an argument
            hint = "set LC_ALL to a locale with UTF-8, for example C.UTF-8"
            status = report_error(UsageError(f"{error.object!a} is not valid text", hint=hint), as_json=as_json)
        except BrokenPipeError:  # `millpy status | head`
            sys.stderr.close()
            status = 0
        except OSError as error:
            if error.errno in REFUSED and error.filename:
                refused = UsageError(f"cannot use {error.filename}: {error.strerror}", hint=REFUSED_HINT)
                raise typer.Exit(report_error(refused, as_json=as_json)) from None
            if error.errno not in FULL:
                raise
            full = StoreUnavailableError("no space is left on the disk", hint=NO_SPACE_HINT)
            status = report_error(full, as_json=as_json)
            _forget_output()
        raise typer.Exit(status)

    inner.__doc__ = _reflowed(inspect.getdoc(command) or "")
    return inner


def _reflowed(text: str) -> str:
    """Return paragraphs of one line each, which `--help` breaks where the terminal ends."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _forget_output() -> None:
    """Discard output that could not be written, or Python tries again at exit and prints another error."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def settings_of(database: str | None, **overrides: object) -> Settings:
    """Load the settings, and configure the log by them."""
    settings = Settings.load(database_url=database, **overrides)
    configure_logging(settings)
    return settings


@contextmanager
def connected_to(
    settings: Settings,
    graph: str | None,
    statement_s_max: float | None = None,
    doing: str = "querying the database",
    *,
    connections_max: int | None = None,
) -> Iterator[Admin]:
    """Connect to the configured database, or to the embedded one of a graph's file.

    Args:
        settings: the settings that name the database.
        graph: the graph's file or name.
        statement_s_max: the seconds after which a statement is cancelled.
        doing: the text on the status line inside the block; empty for none.
        connections_max: how many connections are kept and reused; None for one for each statement.
    """
    from millpy.process.launcher import database as connected  # imported here: --help does not need it

    with connected(settings, graph, create=False) as url, working(doing) if doing else nullcontext():
        admin = Admin(url, statement_s_max=statement_s_max, connections_max=connections_max)
        try:
            yield admin
        finally:
            admin.close()


def graph_in(admin: Admin, graph: str | None) -> str | None:
    """Return the name of a graph given by its file or its name; None for all graphs of the database.

    Reads the file only when the database has several graphs: the file may need settings that are missing here.
    """
    known = admin.graphs()
    if graph is None or graph in known:
        return graph
    file, there = graph.partition(":")[0], f"there are: {', '.join(known) or 'none'}"
    hint = f"{there}; or give a graph's file"
    if not file.endswith(".py"):
        raise UsageError(f"no graph {graph!r} is deployed", hint=hint)
    if not Path(file).is_file():
        raise UsageError(f"there is no file {file}", hint=hint)
    if len(known) <= 1:
        return None
    from millpy.graph.loader import load_graph  # imported here: few calls need the engine

    loaded = load_graph(graph)
    name = admin.name_of(loaded.name, loaded.generation)
    if name is None and loaded.name in known:  # another generation has the name
        raise UsageError(
            f"generation {loaded.generation} of graph {loaded.name!r} is not deployed",
            hint=f"{there}; deploy it, or name one of them",
        )
    return name or loaded.name


def show(
    graph: str | None,
    database: str | None,
    as_json: bool,
    ask: Callable[[Admin, str | None], Mapping[str, Sequence[Row]]],
) -> None:
    """Query the database about one graph or all, and print the answers as tables or as JSON."""
    with connected_to(settings_of(database), graph) as admin:
        answers = ask(admin, graph_in(admin, graph))
    if as_json:
        print_json(answers)
        return
    for title, rows in answers.items():
        if len(answers) > 1:
            tables.say(f"{title}\n")
        tables.echo(rows)
        if len(answers) > 1:
            tables.say("")


def print_json(value: object) -> None:
    """Print JSON in the form of `json_output`."""
    typer.echo(json_text(value))

"""What commands share: options, how an error is worded, how answers are shown."""

from __future__ import annotations

import errno
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer

from millpy.commands import tables
from millpy.complaint import complain
from millpy.config import Settings, configure_logging
from millpy.embedded import NO_SPACE_HINT
from millpy.errors import MillError, StoreUnavailableError, UsageError
from millpy.progress import working
from millpy.store.admin import Admin, Row

P = ParamSpec("P")
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG)
REFUSED_HINT = "name another place, or get the right to this one"
READING_S_MAX = 5.0
"""A snapshot that is held longer slows every commit."""
DatabaseOption = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="Database; default: MILLPY_DATABASE_URL, else the embedded one."),
]
GraphArgument = Annotated[
    str | None,
    typer.Argument(metavar="[GRAPH.py]", help="Graph that is meant, by its file or name.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document; errors, too.")]


def worded(command: Callable[P, int | None]) -> Callable[P, None]:
    """An error that a person can cause ends in a clear line and a status, never in a traceback."""

    @functools.wraps(command)
    def inner(*args: P.args, **kwargs: P.kwargs) -> None:
        as_json = bool(kwargs.get("as_json"))
        try:
            status = command(*args, **kwargs) or 0
            sys.stdout.flush()  # what cannot be written is known here
        except MillError as error:
            status = complain(error, as_json=as_json)
        except UnicodeEncodeError as error:  # what came by the command line was not read as what it is
            hint = "set LC_ALL to a locale with UTF-8, for example C.UTF-8"
            status = complain(UsageError(f"{error.object!a} is no text", hint=hint), as_json=as_json)
        except BrokenPipeError:  # `millpy status | head`
            sys.stderr.close()
            status = 0
        except OSError as error:
            if error.errno in REFUSED and error.filename:
                refused = UsageError(f"cannot use {error.filename}: {error.strerror}", hint=REFUSED_HINT)
                raise typer.Exit(complain(refused, as_json=as_json)) from None
            if error.errno not in FULL:
                raise
            full = StoreUnavailableError("no space is left on the disk", hint=NO_SPACE_HINT)
            status = complain(full, as_json=as_json)
            _forget_output()
        raise typer.Exit(status)

    return inner


def _forget_output() -> None:
    """What could not be written is not tried, and complained about, again at the exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def settings_of(database: str | None) -> Settings:
    """The settings, with the log configured by them."""
    settings = Settings.load(database_url=database)
    configure_logging(settings)
    return settings


@contextmanager
def connected_to(
    settings: Settings,
    graph: str | None,
    statement_s_max: float | None = None,
    doing: str = "asking the database",
) -> Iterator[Admin]:
    """Questions to the configured database, or to the embedded one of a graph's file.

    Args:
        settings: which database.
        graph: its file.
        statement_s_max: a statement that takes longer is cancelled.
        doing: what a terminal shows while inside; empty for what shows itself.
    """
    from millpy.launch import database as connected  # not loaded for --help

    with connected(settings, graph, create=False) as url, working(doing) if doing else nullcontext():
        yield Admin(url, statement_s_max=statement_s_max)


def graph_in(admin: Admin, graph: str | None) -> str | None:
    """The name of the graph that is meant, by its file or its name; None for all that the database has.

    The file is read only when there are several to tell apart: it may need settings that the asker does not have.
    """
    known = admin.graphs()
    if graph is None or graph in known:
        return graph
    file, hint = graph.partition(":")[0], f"there are: {', '.join(known) or 'none'}; or name a graph's file"
    if not file.endswith(".py"):
        raise UsageError(f"no graph {graph!r} is deployed", hint=hint)
    if not Path(file).is_file():
        raise UsageError(f"there is no file {file}", hint=hint)
    if len(known) <= 1:
        return None
    from millpy.graph_file import load_graph  # the engine is not loaded for what can do without

    loaded = load_graph(graph)
    name = admin.name_of(loaded.name, loaded.generation)
    if name is None and loaded.name in known:  # another generation has that name
        raise UsageError(f"generation {loaded.generation} of graph {loaded.name!r} is not deployed", hint=hint)
    return name or loaded.name


def show(
    graph: str | None,
    database: str | None,
    as_json: bool,
    ask: Callable[[Admin, str | None], Mapping[str, Sequence[Row]]],
) -> None:
    """Ask the database about a graph, or about all, and print the answers as tables or as JSON."""
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
    """Print JSON; moments in ISO 8601, what JSON has no form for as its text."""
    typer.echo(json.dumps(value, default=plain, indent=2))


def plain(value: object) -> Any:
    """What JSON has no form for: whole decimals as numbers, all else as its text."""
    if isinstance(value, Decimal) and value == value.to_integral_value():
        return int(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)

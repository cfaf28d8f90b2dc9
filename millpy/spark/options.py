"""The options of the data source: which there are, and what their texts mean.

Spark passes on whatever it is given, in any case, so a misspelt option would be without effect: a filter that filters
nothing. Therefore a name that is unknown is refused.
"""

from __future__ import annotations

import datetime as dt
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from millpy.config.database_url import complete
from millpy.config.secrets import secret
from millpy.embedded import EmbeddedPostgres, embedded_directory
from millpy.errors import ConfigError
from millpy.spark.tables import Condition, SparkTable, as_text

OPTIONS = ("table", "path", "url", "graph", "columns", "from", "to", "keys", "key", "partitions", "batch_rows")
"""`path` is the argument of Spark's `load`, and means the same as `table`."""
STREAM_OPTIONS = ("max_rows_per_trigger", "after_restore")
AFTER_RESTORE = ("refuse", "continue", "reread")
TIME_COLUMNS = ("window_start", "event_time")

Options = Mapping[str, str]


def check_names(options: Options) -> None:
    """Check that every option exists.

    Raises:
        ConfigError: one does not; the hint has the name that is most like it.
    """
    known = (*OPTIONS, *STREAM_OPTIONS)
    for name in options:
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
            raise ConfigError(f'the format "millpy" has no option {name!r}', hint=hint)


def check_not_streaming(options: Options) -> None:
    """Check that a read that is not a stream has no option of streams.

    Raises:
        ConfigError: it has one.
    """
    for name in STREAM_OPTIONS:
        if name in options:
            raise ConfigError(f"option {name} is one of streams", hint="leave it out, or use spark.readStream")


@dataclass(frozen=True)
class DatabaseLocation:
    """A database by its URL, or the embedded one of a graph's file.

    Each process that Spark starts opens it by itself: the embedded server runs as long as a process holds it.
    """

    url: str = ""
    graph: str = ""

    @classmethod
    def from_options(cls, options: Options, default: str | None) -> DatabaseLocation:
        """Return what the options name, else the default, else MILLPY_DATABASE_URL.

        Raises:
            ConfigError: nothing names a database, or the options name two.
        """
        url, graph = options.get("url"), options.get("graph")
        if url and graph:
            raise ConfigError("the options url and graph name two databases", hint="leave one of them out")
        if graph:
            return cls(graph=str(Path(graph).absolute()))
        url = url or default or secret("MILLPY_DATABASE_URL")
        if not url:
            raise ConfigError(
                "no database is configured",
                hint='set MILLPY_DATABASE_URL, or .option("url", ...), or .option("graph", "GRAPH.py")',
            )
        return cls(url=complete(url, secret("MILLPY_DATABASE_PASSWORD")))

    def open(self) -> str:
        """Return a URL that works while this process lives.

        Raises:
            ConfigError: the graph's file has no embedded database beside it.
            StoreUnavailableError: the embedded server does not start.
        """
        return _held(embedded_directory(self.graph)).url() if self.graph else self.url


@cache
def _held(directory: Path) -> EmbeddedPostgres:
    if not (directory / "data").exists():
        raise ConfigError(
            f"there is no embedded database in {directory.parent}",
            hint="run the graph first, on this machine, or name a database in the option url",
        )
    server = EmbeddedPostgres(directory)
    server.start()
    return server


def names(options: Options, name: str) -> tuple[str, ...]:
    """Return the parts of an option that are separated by commas."""
    return tuple(part.strip() for part in options.get(name, "").split(",") if part.strip())


def positive(options: Options, name: str, default: int) -> int:
    """Return an option that is a whole number above 0.

    Raises:
        ConfigError: it is not.
    """
    text = options.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"option {name} is {text!r}", hint="give a whole number above 0")
    return int(text)


def after_restore(options: Options) -> str:
    """Return what a stream does when the database is not the one of its checkpoint.

    Raises:
        ConfigError: the option has another value than `AFTER_RESTORE`.
    """
    text = options.get("after_restore", AFTER_RESTORE[0])
    if text not in AFTER_RESTORE:
        raise ConfigError(f"option after_restore is {text!r}", hint=f"give one of {', '.join(AFTER_RESTORE)}")
    return text


def conditions(options: Options, table: SparkTable) -> list[Condition]:
    """Return the conditions that `from`, `to` and `keys` put on rows.

    Raises:
        ConfigError: one of them cannot be read, or the table has no such column.
    """
    return [*_time_conditions(options, table), *_key_conditions(options, table)]


def _time_conditions(options: Options, table: SparkTable) -> Iterator[Condition]:
    for option, comparison in (("from", ">="), ("to", "<")):
        text = options.get(option)
        if text is None:
            continue
        column = next((name for name in TIME_COLUMNS if name in table.types), None)
        if column is None:
            raise ConfigError(
                f"{table.schema}.{table.name} has no time to filter by", hint=f"leave out the option {option}"
            )
        try:
            moment = dt.datetime.fromisoformat(text)
        except ValueError as error:
            raise ConfigError(f"option {option}: {error}", hint="write it like 2026-11-21T06:00:00Z") from None
        if moment.tzinfo is None:
            raise ConfigError(f"option {option} is {text!r} without a zone", hint=f"write {text}Z if it is UTC")
        yield Condition(column, comparison, (as_text(moment),))


def _key_conditions(options: Options, table: SparkTable) -> Iterator[Condition]:
    text = options.get("keys")
    if text is None:
        return
    try:
        given = json.loads(text)
        wanted = {name: [*values] if isinstance(values, list) else [values] for name, values in given.items()}
    except (ValueError, AttributeError):
        raise ConfigError(f"option keys is {text!r}", hint='write JSON: {"device": ["a", "b"]}') from None
    for name in table.select(tuple(wanted)):
        if None in wanted[name]:
            raise ConfigError(
                f"option keys asks for null in {name!r}", hint="keys are never null; use where() for values"
            )
        yield Condition(name, "= ANY", tuple(as_text(value) for value in wanted[name]))

"""The entry points under `services/` share this module: settings, logs, health and metrics, exit status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.config.settings import Settings, configure_logging
from millpy.errors import ConfigError, MillError, UsageError
from millpy.graph import Graph
from millpy.graph.loader import load_graph
from millpy.process.answering import answering
from millpy.process.assembly import archives_of, deploy
from millpy.process.exit import report_error
from millpy.process.worker_process import run_until_stopped
from millpy.runtime.observer import Observers

log = structlog.get_logger(__name__)
Choose = Callable[[Graph, Sequence[str]], Sequence[str]]


TRACES_TO = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NO_INJECTORS = "--no-injectors"
ROLES = "--roles"
HELP = ("-h", "--help")
ROLE_PREFIX = "millpy"


def as_given(graph: Graph, named: Sequence[str]) -> Sequence[str]:
    """Return the named computations: all if `named` is empty, all but the injectors for `--no-injectors`."""
    if list(named) != [NO_INJECTORS]:
        return named
    return [spec.name for spec in graph.spec().computations if spec.kind == "stage"]


def injectors(graph: Graph, named: Sequence[str]) -> Sequence[str]:
    """Return the named computations; all injectors of the graph if `named` is empty."""
    return named or [spec.name for spec in graph.spec().computations if spec.kind == "injector"]


def archives(graph: Graph, named: Sequence[str]) -> Sequence[str]:
    """Return the named archives; all archives of the graph if `named` is empty.

    Raises:
        UsageError: the graph has no archive.
    """
    return named or archives_of(graph)


def serve(arguments: Sequence[str], choose: Choose = as_given, *, usage: str | None = None) -> int:
    """Run a worker as a service. Return the exit status.

    Args:
        arguments: the graph's file, then names of computations.
        choose: returns the names of the computations to run; empty for all.
        usage: what `--help` prints.
    """
    if _shows_usage(arguments, usage):
        return 0
    try:
        _check_assertions()
        if not arguments:
            raise UsageError(
                "no graph is given", hint="name the graph's file, and computations to restrict the worker to them"
            )
        settings = Settings.load()
        configure_logging(settings)
        database_url = _database_of(settings)
        graph = load_graph(arguments[0])
        only = choose(graph, arguments[1:])
        if choose is archives:
            settings = settings.only_archiving()
        observers = Observers()
        with answering(settings.http, graph, observers), _traced(graph, observers):
            run_until_stopped(graph, database_url, settings, only=only, patient=True, observer=observers)
    except MillError as error:
        return report_error(error)
    return 0


def prepare(arguments: Sequence[str], *, usage: str | None = None) -> int:
    """Migrate the database and deploy graphs; return the exit status.

    It does not wait for the database: the caller must start it again while the database is unreachable.

    Args:
        arguments: files of graphs; `--roles` among them also creates the roles owner, worker and reader.
        usage: what `--help` prints.
    """
    if _shows_usage(arguments, usage):
        return 0
    from millpy.store.postgres.deployment.migrate import migrate  # SQLAlchemy and Alembic, which workers do not need

    try:
        _check_assertions()
        settings = Settings.load()
        configure_logging(settings)
        database_url = _database_of(settings)
        graphs = [load_graph(file) for file in arguments if file != ROLES]
        migrate(database_url, ROLE_PREFIX if ROLES in arguments else None)
        log.info("the database is up to date")
        for graph in graphs:
            asyncio.run(deploy(graph, database_url))
            log.info("the graph is deployed", graph=graph.permanent_name)
    except MillError as error:
        return report_error(error)
    return 0


def _shows_usage(arguments: Sequence[str], usage: str | None) -> bool:
    """Print the usage if it is asked for, which needs neither a graph nor a database."""
    asked = usage is not None and any(argument in HELP for argument in arguments)
    if asked:
        print(usage)
    return asked


@contextmanager
def _traced(graph: Graph, observers: Observers) -> Iterator[None]:
    """Export traces by OpenTelemetry inside the context, if its variables name an endpoint."""
    if not any(os.environ.get(name) for name in TRACES_TO) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield
        return
    try:
        from millpy.observability.traces import Traces, otlp_provider  # needs an optional dependency
    except ImportError as error:
        message = f"{TRACES_TO[0]} is set, but OpenTelemetry is not installed"
        raise ConfigError(message, hint=to_install("traces")) from error
    provider = otlp_provider()
    observers.add(Traces(graph.permanent_name, provider, SystemClock()))
    try:
        yield
    finally:
        provider.shutdown()


def _check_assertions() -> None:
    if not __debug__:
        raise UsageError(
            "millpy does not run without assertions", hint="unset PYTHONOPTIMIZE, and start Python without -O"
        )


def _database_of(settings: Settings) -> str:
    if settings.database_url is None:
        raise ConfigError("no database is configured", hint="set MILLPY_DATABASE_URL")
    return settings.database_url

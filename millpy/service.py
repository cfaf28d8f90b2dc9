"""What the entry points under `services/` share: settings, JSON logs, health and metrics over HTTP, an exit status."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import structlog

from millpy.assembly import deploy
from millpy.clock import SystemClock
from millpy.complaint import complain
from millpy.config import Settings, configure_logging
from millpy.errors import ConfigError, MillError, UsageError
from millpy.extras import to_install
from millpy.graph import Graph
from millpy.graph_file import load_graph
from millpy.runtime.observer import Observers
from millpy.store.migrate import migrate
from millpy.worker_process import run_until_told

log = structlog.get_logger(__name__)
Choose = Callable[[Graph, Sequence[str]], Sequence[str]]


TRACES_TO = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
NO_INJECTORS = "--no-injectors"
ROLES = "--roles"
ROLE_PREFIX = "millpy"


def as_given(graph: Graph, named: Sequence[str]) -> Sequence[str]:
    """Those computations that were named; all when none was, or all but the injectors."""
    if list(named) != [NO_INJECTORS]:
        return named
    return [spec.name for spec in graph.spec().computations if spec.kind != "injector"]


def injectors(graph: Graph, named: Sequence[str]) -> Sequence[str]:
    """Those computations that were named, or all injectors of the graph."""
    return named or [spec.name for spec in graph.spec().computations if spec.kind == "injector"]


def serve(arguments: Sequence[str], choose: Choose = as_given) -> int:
    """Run a worker on a graph file and the computations that `choose` picks; returns the exit status."""
    try:
        _check_assertions()
        if not arguments:
            raise UsageError("no graph is given", hint="name its file, and computations if it is not for all of them")
        settings = Settings.load()
        configure_logging(settings)
        database_url = _database_of(settings)
        graph = load_graph(arguments[0])
        only = choose(graph, arguments[1:])
        observers = Observers()
        with _answering(graph, settings, observers), _traced(graph, observers):
            run_until_told(graph, database_url, settings, only=only, patient=True, observer=observers)
    except MillError as error:
        return complain(error)
    return 0


def prepare(arguments: Sequence[str]) -> int:
    """Migrate the database and deploy graphs; returns the exit status.

    Whoever starts this starts it again while the database is away.

    Args:
        arguments: files of graphs; `--roles` among them also makes the roles owner, worker and reader.
    """
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
            log.info("the graph is deployed", graph=graph.own_name)
    except MillError as error:
        return complain(error)
    return 0


@contextmanager
def _answering(graph: Graph, settings: Settings, observers: Observers) -> Iterator[None]:
    """Health and metrics over HTTP while inside."""
    try:
        from millpy.observe.metrics import Metrics  # needs an optional dependency
        from millpy.observe.vitals import Vitals
        from millpy.observe.web import address_of, application, listening
    except ImportError as error:
        message = "a service needs the package prometheus-client"
        raise ConfigError(message, hint=to_install("service")) from error
    vitals, metrics = Vitals(), Metrics(graph.own_name, SystemClock())
    observers.add(vitals)
    observers.add(metrics)
    host, port = address_of(settings.http)
    with listening((host, port), application(vitals.live, vitals.ready, metrics.registry)) as port:
        log.info("answering over HTTP", graph=graph.own_name, host=host, port=port)
        yield


@contextmanager
def _traced(graph: Graph, observers: Observers) -> Iterator[None]:
    """Traces for OpenTelemetry while inside, when its variables say where to."""
    if not any(os.environ.get(name) for name in TRACES_TO) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield
        return
    try:
        from millpy.observe.traces import Traces, exporting  # needs an optional dependency
    except ImportError as error:
        message = f"{TRACES_TO[0]} is set, and OpenTelemetry is not installed"
        raise ConfigError(message, hint=to_install("traces")) from error
    provider = exporting()
    observers.add(Traces(graph.own_name, provider, SystemClock()))
    try:
        yield
    finally:
        provider.shutdown()


def _check_assertions() -> None:
    if not __debug__:
        raise UsageError("millpy does not run without its assertions", hint="leave out python -O")


def _database_of(settings: Settings) -> str:
    if settings.database_url is None:
        raise ConfigError("no database is configured", hint="set MILLPY_DATABASE_URL")
    return settings.database_url

"""Health and metrics over HTTP: of a worker in this process, or of the workers of `millpy run --workers N`.

Each worker of a supervisor serves its own pages at a port of localhost that the system chooses, and writes the port to
a file of the supervisor's private directory. The supervisor asks all workers when it is asked:

    /live      200 while one worker is live or about to be started
    /ready     200 while one worker is ready; the others take over what a lost one did
    /metrics   the metrics of all workers, each with the label `worker`, and the supervisor's own
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import structlog

from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from millpy.graph import Graph
    from millpy.observability.health import HealthCheck
    from millpy.process.supervisor import Supervisor
    from millpy.runtime.observer import Observers

log = structlog.get_logger("millpy.process.answering")
LOCALHOST = "127.0.0.1"
Pages: TypeAlias = "tuple[Callable[[], HealthCheck], Callable[[], HealthCheck], CollectorRegistry]"
"""What answers /live and /ready, and the metrics."""


@contextmanager
def answering(
    address: str, graph: Graph, observers: Observers, on_port: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Serve health and metrics of this process's worker inside the context; nothing for an empty address.

    Raises:
        ConfigError: the package for it is not installed, or the address is none or in use.
    """
    if not address:
        yield
        return

    def pages() -> Pages:
        from millpy.observability.health import HealthMonitor
        from millpy.observability.metrics import Metrics

        health, metrics = HealthMonitor(), Metrics(graph.permanent_name, SystemClock())
        observers.add(health)
        observers.add(metrics)
        return health.live, health.ready, metrics.registry

    with _listening(address, pages) as (host, port):
        if on_port is not None:
            on_port(port)
        else:
            log.info("serving HTTP", graph=graph.permanent_name, host=host, port=port)
        yield


@contextmanager
def answering_beside(port_file: str, graph: Graph, observers: Observers) -> Iterator[None]:
    """Serve at a port that the system chooses, and write it to a file; nothing for an empty name."""

    def write(port: int) -> None:
        made = Path(port_file).with_suffix(".new")
        made.write_text(f"{port}\n")
        made.replace(port_file)

    with answering(f"{LOCALHOST}:0" if port_file else "", graph, observers, write):
        yield


def port_file_arguments(directory: Path, worker: int) -> Sequence[str]:
    """Return the arguments by which a worker writes its port; forget the port of the process before it."""
    _port_file(directory, worker).unlink(missing_ok=True)
    return "--http-port-file", str(_port_file(directory, worker))


def _port_file(directory: Path, worker: int) -> Path:
    return directory / f"worker-{worker}.port"


@contextmanager
def answering_for(
    address: str,
    graph: str,
    directory: Path,
    supervisor: Supervisor,
    on_port: Callable[[int], None] = lambda _: None,
) -> Iterator[None]:
    """Serve health and metrics of a supervisor's workers inside the context; nothing for an empty address.

    Raises:
        ConfigError: the package for it is not installed, or the address is none or in use.
    """
    if not address:
        yield
        return

    def pages() -> Pages:
        from millpy.observability.workers_pages import WorkersPages

        made = WorkersPages(graph, lambda worker: _port_file(directory, worker), supervisor)
        return made.live, made.ready, made.registry

    with _listening(address, pages) as (host, port):
        log.info("serving HTTP of all workers", graph=graph, host=host, port=port)
        on_port(port)
        yield


@contextmanager
def _listening(address: str, pages: Callable[[], Pages]) -> Iterator[tuple[str, int]]:
    """Serve what `pages` returns; yield host and port. Raises ConfigError."""
    try:  # they need an optional dependency
        from millpy.observability.http import address_of, application, listening

        live, ready, registry = pages()
    except ImportError as error:
        raise ConfigError("serving HTTP needs the package prometheus-client", hint=to_install("service")) from error
    host, port = address_of(address)
    with listening((host, port), application(live, ready, registry)) as port:
        yield host, port

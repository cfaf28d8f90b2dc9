"""Health and metrics over HTTP: of a worker in this process, or of the workers of `millpy run --workers N`.

Each worker of a supervisor serves its own pages at a port of localhost that the system chooses, and writes the port to
a file of the supervisor's private directory. The supervisor asks all workers when it is asked:

    /live      200 while one worker is live or about to be started
    /ready     200 while one worker is ready; the others take over what a lost one did
    /metrics   the metrics of all workers, each with the label `worker`, and the supervisor's own
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from millpy.clock import SystemClock
from millpy.config.extras import to_install
from millpy.errors import ConfigError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from millpy.graph import Graph
    from millpy.observability.health import HealthCheck
    from millpy.process.supervisor import Supervisor
    from millpy.runtime.observer import Observers

log = structlog.get_logger("millpy.process.answering")
LOCALHOST = "127.0.0.1"
ANSWER_S_MAX = 6.0
"""Seconds; /live of a worker waits up to five for its event loop."""
ANSWER_BYTES_MAX = 32_000_000


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
    try:
        from millpy.observability.health import HealthMonitor
        from millpy.observability.http import address_of, application, listening
        from millpy.observability.metrics import Metrics  # needs an optional dependency
    except ImportError as error:
        raise _not_installed() from error
    health, metrics = HealthMonitor(), Metrics(graph.permanent_name, SystemClock())
    observers.add(health)
    observers.add(metrics)
    host, port = address_of(address)
    with listening((host, port), application(health.live, health.ready, metrics.registry)) as port:
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
    try:
        from prometheus_client import CollectorRegistry

        from millpy.observability.http import address_of, application, listening
    except ImportError as error:
        raise _not_installed() from error
    pages = WorkersPages(graph, directory, supervisor)
    registry = CollectorRegistry()
    registry.register(pages)
    host, port = address_of(address)
    with listening((host, port), application(pages.live, pages.ready, registry)) as port:
        log.info("serving HTTP of all workers", graph=graph, host=host, port=port)
        on_port(port)
        yield


class WorkersPages:
    """Health and metrics of the workers of a supervisor; a collector of Prometheus.

    Args:
        graph: the graph's name.
        directory: where the workers write their ports.
        supervisor: the supervisor.
    """

    def __init__(self, graph: str, directory: Path, supervisor: Supervisor) -> None:
        self._graph = graph
        self._directory = directory
        self._supervisor = supervisor

    def live(self) -> HealthCheck:
        """Tell whether a worker is live, or about to be started again."""
        return self._check("live", starting=True)

    def ready(self) -> HealthCheck:
        """Tell whether a worker is ready."""
        return self._check("ready", starting=False)

    def _check(self, page: str, *, starting: bool) -> HealthCheck:
        from millpy.observability.health import HealthCheck

        workers: list[dict[str, Any]] = []
        for worker, (pid, answer) in enumerate(self._ask(f"/{page}")):
            found: dict[str, Any] = {"number": worker, "pid": pid, "restarts": self._supervisor.restarts[worker]}
            if answer is None:
                found |= {page: starting, "reason": "does not run" if pid is None else "does not answer yet"}
            else:
                with suppress(ValueError):
                    found |= json.loads(answer)
            workers.append(found)
        return HealthCheck(any(found.get(page) for found in workers), {"workers": workers})

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of all workers, each with its number as the label `worker`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        from prometheus_client.parser import text_string_to_metric_families

        pids = self._supervisor.running()
        running = GaugeMetricFamily("millpy_workers", "Worker processes by state.", labels=("graph", "state"))
        running.add_metric((self._graph, "running"), sum(pid is not None for pid in pids))
        running.add_metric((self._graph, "down"), sum(pid is None for pid in pids))
        yield running
        restarts = CounterMetricFamily(
            "millpy_worker_restarts", "Worker processes started again.", labels=("graph", "worker")
        )
        for worker, count in enumerate(self._supervisor.restarts):
            restarts.add_metric((self._graph, str(worker)), count)
        yield restarts
        families: dict[str, Metric] = {}
        for worker, (_, answer) in enumerate(self._ask("/metrics")):
            if answer is None:
                continue
            for family in text_string_to_metric_families(answer.decode()):
                known = families.setdefault(family.name, family)
                samples = [s._replace(labels={**s.labels, "worker": str(worker)}) for s in family.samples]
                known.samples = [*(known.samples if known is not family else ()), *samples]
        yield from families.values()

    def _ask(self, path: str) -> list[tuple[int | None, bytes | None]]:
        """Ask all workers at once; return the process and the answer of each, None for one without."""
        pids = self._supervisor.running()

        def ask(worker: int) -> bytes | None:
            if pids[worker] is None:
                return None
            with suppress(OSError, ValueError, http.client.HTTPException):
                port = int(_port_file(self._directory, worker).read_text())
                connection = http.client.HTTPConnection(LOCALHOST, port, timeout=ANSWER_S_MAX)
                try:
                    connection.request("GET", path)
                    body = connection.getresponse().read(ANSWER_BYTES_MAX + 1)
                    return body if len(body) <= ANSWER_BYTES_MAX else None
                finally:
                    connection.close()
            return None

        with ThreadPoolExecutor(len(pids), thread_name_prefix="ask") as pool:
            return list(zip(pids, pool.map(ask, range(len(pids))), strict=True))


def _not_installed() -> ConfigError:
    return ConfigError("serving HTTP needs the package prometheus-client", hint=to_install("service"))

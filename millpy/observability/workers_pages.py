"""Health and metrics of the workers of a supervisor, from the pages that each of them serves on localhost."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from millpy.observability.health import HealthCheck

LOCALHOST = "127.0.0.1"
ANSWER_S_MAX = 6.0
"""Seconds; /live of a worker waits up to five for its event loop."""
ANSWER_BYTES_MAX = 32_000_000


class WorkersState(Protocol):
    """What a supervisor knows of its workers."""

    @property
    def restarts(self) -> Sequence[int]:
        """How often each worker was started again."""
        ...

    def running(self) -> Sequence[int | None]:
        """Return the process id of each worker; None for one that does not run."""
        ...


class WorkersPages(Collector):
    """Health and metrics of the workers of a supervisor; a collector of Prometheus.

    Args:
        graph: the graph's name.
        port_file: returns the file that the worker with a number writes its port to.
        supervisor: the supervisor.

    Attributes:
        registry: the metrics of all workers.
    """

    def __init__(self, graph: str, port_file: Callable[[int], Path], supervisor: WorkersState) -> None:
        self._graph = graph
        self._port_file = port_file
        self._supervisor = supervisor
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def live(self) -> HealthCheck:
        """Tell whether a worker is live, or about to be started again."""
        return self._check("live", starting=True)

    def ready(self) -> HealthCheck:
        """Tell whether a worker is ready."""
        return self._check("ready", starting=False)

    def _check(self, page: str, *, starting: bool) -> HealthCheck:
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
                port = int(self._port_file(worker).read_text())
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

"""Metrics of the auditor for Prometheus."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge

from millpy.observability.health import HealthCheck
from millpy.observability.http import address_of, application, listening

log = logging.getLogger(__name__)


class AuditMetrics:
    """What an auditor has compared since it started."""

    def __init__(self, graph: str) -> None:
        self.registry = CollectorRegistry()
        self._graph = graph
        labels = ("graph", "table")
        self._rows = Counter("millpy_audited_rows", "Rows compared with their history.", labels, registry=self.registry)
        self._differences = Counter(
            "millpy_audit_differences", "Rows that differ from their history.", labels, registry=self.registry
        )
        self._until = Gauge(
            "millpy_audited_until_seconds", "End of the newest hour that was audited.", labels, registry=self.registry
        )
        failures = Counter("millpy_audit_failures", "Audits that failed.", ("graph",), registry=self.registry)
        self.failures = failures.labels(graph)

    def add(self, table: str, found: Mapping[str, Any], until_us: int) -> None:
        """Count the audit of one table."""
        self._rows.labels(self._graph, table).inc(found["rows"])
        self._differences.labels(self._graph, table).inc(found["differences"])
        self._until.labels(self._graph, table).set(until_us / 1e6)


@contextmanager
def serving(metrics: AuditMetrics, address: str) -> Iterator[None]:
    """Serve health and metrics over HTTP inside the context. A loop that runs is live and ready."""

    def well() -> HealthCheck:
        return HealthCheck(True, {})

    host, port = address_of(address)
    with listening((host, port), application(well, well, metrics.registry)) as port:
        log.info("serving HTTP on %s:%d", host, port)
        yield

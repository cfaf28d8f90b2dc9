"""Traces for OpenTelemetry: one span a turn, with gathering, stepping and committing inside it.

Off unless OpenTelemetry's own variables configure an exporter (OTEL_EXPORTER_OTLP_ENDPOINT and the like). Spans are
made after a commit, from the times that the worker has recorded, so they do not delay the turn.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from millpy.clock import Clock
from millpy.errors import MillError
from millpy.runtime.observer import TurnTimes
from millpy.runtime.owned_interval import OwnedInterval
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker


def otlp_provider() -> TracerProvider:
    """Return a provider that exports spans by OTLP over HTTP, configured by OpenTelemetry's variables."""
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {SERVICE_NAME: "millpy"}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class Traces:
    """Watches one worker process; an `Observer`."""

    def __init__(self, graph: str, provider: TracerProvider, clock: Clock) -> None:
        self._tracer = provider.get_tracer("millpy")
        self._clock = clock
        self._known: dict[str, str] = {"millpy.graph": graph}
        self._names: dict[int, str] = {}

    def waiting(self, error: MillError) -> None:
        """Do nothing: without a worker there are no turns."""

    def begun(self, worker: Worker) -> None:
        """Add the worker's id to all spans."""
        self._known["millpy.worker"] = str(worker.context.worker_id)

    def ended(self) -> None:
        """Do nothing: all turns have their spans."""

    def holds(self, intervals: Mapping[int, OwnedInterval], claimed: int) -> None:
        """Record a takeover as a span without length."""
        self._names.update((interval_id, interval.plan.name) for interval_id, interval in intervals.items())
        if claimed:
            now = self._clock.now_us() * 1_000
            span = self._tracer.start_span(
                "takeover", attributes={**self._known, "millpy.intervals": claimed}, start_time=now
            )
            span.end(now)

    def committed(self, turn: Turn, at: TurnTimes) -> None:
        """Record a turn and its three parts."""
        elsewhere = self._clock.now_us() * 1_000 - int(self._clock.monotonic() * 1e9)

        def wall(moment: float) -> int:
            return int(moment * 1e9) + elsewhere

        computations = sorted({self._names[checkpoint.grant.interval_id] for checkpoint in turn.checkpoints})
        span = self._tracer.start_span(
            "turn",
            attributes={**self._known, "millpy.records": turn.records, "millpy.computations": computations},
            start_time=wall(at.gathered),
        )
        if span.is_recording():
            inside = set_span_in_context(span)
            parts = (
                ("gather", at.gathered, at.stepped_from),
                ("step", at.stepped_from, at.stepped_to),
                ("commit", at.sent, at.committed),
            )
            for name, begins, ends in parts:
                self._tracer.start_span(name, inside, start_time=wall(begins)).end(wall(ends))
        span.end(wall(at.committed))

    def failed(self, error: MillError) -> None:
        """Record a failed turn as a span without length, with its error."""
        now = self._clock.now_us() * 1_000
        span = self._tracer.start_span("failed turn", attributes=self._known, start_time=now)
        span.set_status(Status(StatusCode.ERROR, error.message))
        span.record_exception(error, timestamp=now)
        span.end(now)

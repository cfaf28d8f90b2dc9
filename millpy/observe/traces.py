"""Traces for OpenTelemetry: a span a turn, with gathering, stepping and committing inside it.

Off unless an exporter is configured as OpenTelemetry's own variables say (OTEL_EXPORTER_OTLP_ENDPOINT and the like).
Spans are made behind a commit, from the moments that the worker has noted: a turn pays nothing for them before.
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
from millpy.runtime.observer import Moments
from millpy.runtime.soft_state import Owned
from millpy.runtime.turn import Turn
from millpy.runtime.worker import Worker


def exporting() -> TracerProvider:
    """Exports by OTLP over HTTP; where to, what is sampled and who we are comes by OpenTelemetry's variables."""
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
        """No worker, no turns."""

    def begun(self, worker: Worker) -> None:
        """Spans say whose they are."""
        self._known["millpy.worker"] = str(worker.worker_id)

    def ended(self) -> None:
        """What it has done is told."""

    def holds(self, intervals: Mapping[int, Owned], claimed: int) -> None:
        """A takeover is a span without length."""
        self._names.update((interval_id, interval.plan.name) for interval_id, interval in intervals.items())
        if claimed:
            now = self._clock.now_us() * 1_000
            span = self._tracer.start_span(
                "takeover", attributes={**self._known, "millpy.intervals": claimed}, start_time=now
            )
            span.end(now)

    def committed(self, turn: Turn, at: Moments) -> None:
        """A turn and its three parts."""
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
        """A span without length, and what went wrong."""
        now = self._clock.now_us() * 1_000
        span = self._tracer.start_span("failed turn", attributes=self._known, start_time=now)
        span.set_status(Status(StatusCode.ERROR, error.message))
        span.record_exception(error, timestamp=now)
        span.end(now)

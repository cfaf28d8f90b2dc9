"""The entry points under services/ as processes: health, metrics, logs, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

from millpy.embedded import EmbeddedPostgres
from tests.waiting import WITHIN_S, await_true

ROOT = Path(__file__).resolve().parents[2]
Spans = dict[str, list[dict[str, object]]]
GRAPH = Path(__file__).with_name("services_graph.py")


class Unlogged(WSGIRequestHandler):
    """Does not log its requests."""

    def log_message(self, *arguments: object) -> None:
        pass


class Service:
    """`python -m services.NAME` with its log and its pages."""

    def __init__(self, directory: Path, name: str, *arguments: str, **environment: str) -> None:
        self.log = directory / f"{name}.log"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("MILLPY_")}
        own = {
            "PYTHONPATH": str(ROOT),
            "MILLPY_LOG_FORMAT": "json",
            "MILLPY_HTTP": "127.0.0.1:0",
            "MILLPY_LEASE_S": "2",
            "MILLPY_RETRY_S_MAX": "0.3",
            "YARD_INPUT": str(directory / "in"),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{name}", *arguments],
                stdout=log,
                stderr=log,
                env={**inherited, **own, **environment},
                cwd=directory,
            )

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def ask(self, path: str) -> tuple[int, str]:
        output = await_true(lambda: [line for line in self.lines() if "port" in line], "the service says its port")
        with closing(HTTPConnection("127.0.0.1", output[0]["port"], timeout=WITHIN_S)) as connection:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def probe(self, path: str) -> tuple[int, dict[str, Any]]:
        status, text = self.ask(path)
        return status, json.loads(text)

    def metric(self, name: str, **labels: str) -> float | None:
        """Return the sum of the samples with these labels; None if there are none."""
        families = text_string_to_metric_families(self.ask("/metrics")[1])
        found = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WITHIN_S)


@pytest.fixture
def collector() -> Iterator[tuple[str, Spans]]:
    """A place to export traces to: its address, and attributes of the spans that came, by name."""
    spans: Spans = {}

    def receive(environment: dict[str, Any], answer: Callable[..., object]) -> list[bytes]:
        request = ExportTraceServiceRequest.FromString(
            environment["wsgi.input"].read(int(environment["CONTENT_LENGTH"]))
        )
        for span in (s for r in request.resource_spans for scope in r.scope_spans for s in scope.spans):
            known = {a.key: a.value.string_value or a.value.int_value for a in span.attributes}
            known |= {"took_ns": span.end_time_unix_nano - span.start_time_unix_nano, "inside": span.parent_span_id}
            spans.setdefault(span.name, []).append(known)
        answer("200 OK", [("Content-Type", "application/x-protobuf")])
        return [b""]

    with make_server("127.0.0.1", 0, receive, handler_class=Unlogged) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", spans
        server.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts services that do not outlive the test."""
    (tmp_path / "in").mkdir()
    started: list[Service] = []

    def begin(name: str, *arguments: str, **environment: str) -> Service:
        started.append(Service(tmp_path, name, *arguments, **environment))
        return started[-1]

    yield begin
    for service in started:
        service.process.kill()
        service.process.wait()


def test_a_worker_is_ready_while_the_database_answers_and_counts_what_it_commits(
    tmp_path: Path, start: Callable[..., Service], collector: tuple[str, Spans]
) -> None:
    address, spans = collector
    server = EmbeddedPostgres(tmp_path / "postgres")
    server.start()
    url = server.url()
    server.kill()
    traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": address, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    worker = start("worker", str(GRAPH), MILLPY_DATABASE_URL=url, **traced)
    await_true(lambda: "cannot reach" in str(worker.probe("/ready")), "it says that the database is away")
    assert worker.probe("/live") == (200, {"live": True})

    server.restart()
    await_true(lambda: "not migrated" in str(worker.probe("/ready")), "it says that the schema is not there")
    assert worker.probe("/ready")[0] == 503
    migrated = start("migrate", str(GRAPH), MILLPY_DATABASE_URL=url)
    assert migrated.process.wait(WITHIN_S) == 0
    assert [line["event"] for line in migrated.lines()] == ["the database is up to date", "the graph is deployed"]
    await_true(lambda: worker.probe("/ready")[0] == 200, "readiness")
    known = await_true(lambda: (k := worker.probe("/ready")[1])["intervals"] == 5 and k, "all intervals")
    assert known["graph"] == "yard"

    lines = [
        {"device": f"d{n % 3}", "id": n % 40, "at": int(time.time()) + 120 + n} for n in range(50)
    ]  # ahead of the idle clock
    (tmp_path / "part").write_text("".join(json.dumps(line) + "\n" for line in lines) + "rubbish\n")
    (tmp_path / "part").rename(tmp_path / "in" / "one.ndjson")
    await_true(lambda: worker.metric("millpy_records_total", outcome="consumed") == 40, "records in windows")
    of = {"graph": "yard", "computation": "readings"}
    assert worker.metric("millpy_records_total", **of, outcome="injected") == 51
    assert worker.metric("millpy_records_total", **of, outcome="accepted") == 40
    assert worker.metric("millpy_records_total", **of, outcome="duplicate") == 10
    assert worker.metric("millpy_dead_letters_total", **of, reason="undecodable") == 1
    assert worker.metric("millpy_takeovers_total") >= 5
    await_true(lambda: worker.metric("millpy_lease_trusted") == 1, "a lease")
    await_true(lambda: worker.metric("millpy_watermark_lag_seconds", **of) is not None, "a watermark")
    await_true(lambda: worker.metric("millpy_backlog_records", producer="readings") == 0, "no backlog")
    commits = worker.metric("millpy_commits_total")
    assert commits and worker.metric("millpy_turn_seconds_count") >= commits

    server.kill()
    await_true(lambda: worker.probe("/ready")[0] == 503, "it is not ready without a database")
    assert worker.probe("/live")[0] == 200
    server.restart()
    await_true(lambda: worker.probe("/ready")[0] == 200, "readiness again")
    assert worker.end() == 0
    server.release()
    turns = [span for span in spans["turn"] if span["millpy.records"]]
    assert turns
    assert all(span["millpy.graph"] == "yard" and span["took_ns"] > 0 for span in turns)
    assert len(spans["gather"]) == len(spans["step"]) == len(spans["commit"]) == len(spans["turn"])
    assert all(span["inside"] for span in spans["commit"])
    assert sum(span["millpy.intervals"] for span in spans["takeover"]) >= 5
    assert spans["failed turn"]


@pytest.mark.parametrize(
    ("name", "arguments", "environment", "complaint"),
    [
        ("injector", [str(GRAPH)], {"MILLPY_HTTP": "everywhere"}, "MILLPY_HTTP: 'everywhere' is not an address"),
        ("migrate", [], {"MILLPY_DATABASE_URL": "postgresql://127.0.0.1:1/none"}, "cannot reach the database"),
    ],
    ids=["no address", "database away"],
)
def test_a_mistake_is_one_line_and_a_hint(
    start: Callable[..., Service], name: str, arguments: list[str], environment: dict[str, str], complaint: str
) -> None:
    service = start(name, *arguments, **{"MILLPY_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", **environment})

    assert service.process.wait(WITHIN_S) in (1, 2)
    output = service.log.read_text().splitlines()
    assert output[0].startswith("millpy: ")
    assert complaint in output[0]
    assert output[1].startswith("  hint: ")
    assert len(output) == 2

"""Health and metrics of the workers of `millpy run --workers N --http`: one page for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from millpy.errors import ConfigError
from millpy.observability.health import HealthCheck
from millpy.observability.http import application, listening
from millpy.process.answering import LOCALHOST, answering_for, port_file_arguments


class Workers:
    """Two workers, of which tests set the health."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.pids: list[int | None] = [100, 101]
        self.ready = [True, True]
        self.supervisor: Any = SimpleNamespace(running=lambda: self.pids, restarts=[0, 2])
        for worker in (0, 1):
            registry = CollectorRegistry()
            Counter("millpy_commits", "Turns committed.", ("graph",), registry=registry).labels("g").inc(10 + worker)
            Histogram("millpy_turn_seconds", "Seconds.", ("graph",), registry=registry).labels("g").observe(0.1)
            app = application(lambda: HealthCheck(True), lambda n=worker: self.check(n), registry)  # type: ignore[misc]
            port = stack.enter_context(listening((LOCALHOST, 0), app))
            Path(port_file_arguments(directory, worker)[1]).write_text(f"{port}\n")
        here = answering_for(f"{LOCALHOST}:0", "g", directory, self.supervisor, self.on_port)
        stack.enter_context(here)

    def on_port(self, port: int) -> None:
        self.port = port

    def check(self, worker: int) -> HealthCheck:
        return HealthCheck(self.ready[worker], {"worker": f"id {worker}"})

    def ask(self, page: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://{LOCALHOST}:{self.port}/{page}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            with error:
                return error.code, error.read().decode()


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with ExitStack() as stack:
        yield Workers(tmp_path, stack)


def test_metrics_of_all_workers_are_on_one_page_and_can_be_summed(workers: Workers) -> None:
    status, text = workers.ask("metrics")

    assert status == 200
    assert 'millpy_commits_total{graph="g",worker="0"} 10.0' in text
    assert 'millpy_commits_total{graph="g",worker="1"} 11.0' in text
    assert 'millpy_turn_seconds_bucket{graph="g",le="0.1",worker="1"} 1.0' in text
    assert 'millpy_workers{graph="g",state="running"} 2.0' in text
    assert 'millpy_worker_restarts_total{graph="g",worker="1"} 2.0' in text
    assert text.count("# HELP millpy_commits_total ") == 1


def test_service_is_ready_while_one_worker_is_and_says_what_the_others_lack(workers: Workers) -> None:
    workers.ready[0], workers.pids[1] = True, None
    assert workers.ask("ready")[0] == 200

    workers.ready[0] = False
    status, text = workers.ask("ready")

    assert status == 503
    assert json.loads(text)["workers"] == [
        {"number": 0, "pid": 100, "restarts": 0, "ready": False, "worker": "id 0"},
        {"number": 1, "pid": None, "restarts": 2, "ready": False, "reason": "does not run"},
    ]
    assert workers.ask("live")[0] == 200  # the second one is started again


def test_port_of_a_process_that_ended_is_forgotten(workers: Workers, tmp_path: Path) -> None:
    port_file_arguments(tmp_path, 1)  # it starts again

    assert 'worker="0"' in workers.ask("metrics")[1]
    assert 'millpy_commits_total{graph="g",worker="1"}' not in workers.ask("metrics")[1]
    assert json.loads(workers.ask("live")[1])["workers"][1]["reason"] == "does not answer yet"


def test_address_that_is_none_is_refused_before_a_worker_starts(tmp_path: Path) -> None:
    supervisor: Any = SimpleNamespace(running=list, restarts=[])
    with pytest.raises(ConfigError, match="is not an address"), answering_for("8080", "g", tmp_path, supervisor):
        pass

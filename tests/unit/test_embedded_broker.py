"""The next user ends the broker of a killed process, and no other process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millpy.embedded import EmbeddedBroker, end_broker_left_behind, free_port
from millpy.errors import SourceUnavailableError
from tests.processes import is_gone

ROOT = Path(__file__).resolve().parents[2]
STARTER = """
import sys
from millpy.embedded import EmbeddedBroker
broker = EmbeddedBroker(sys.argv[1])
if sys.argv[2] == "amqtt":
    broker.program = None
broker.start()
print(broker.pid(), broker.port, flush=True)
input()
"""


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 90
    while not holds():
        assert time.monotonic() < deadline, f"not within 90 s: {what}"
        os.sched_yield()


@pytest.fixture
def bystander(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with a broker, though it names its file."""
    command = [sys.executable, "-c", "input()", str(tmp_path / "mosquitto.conf")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        yield process


@pytest.mark.parametrize("program", ["mosquitto", "amqtt"])
def test_broker_of_a_killed_starter_is_ended_and_its_port_free(tmp_path: Path, program: str) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path), program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        pid, port = map(int, starter.stdout.readline().split())
        starter.kill()
    socket.create_connection(("127.0.0.1", port)).close()  # it has outlived its starter

    end_broker_left_behind(tmp_path)

    until(lambda: is_gone(pid), "what was killed is gone")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    end_broker_left_behind(tmp_path)  # and again


def test_another_server_at_its_port_does_not_pass_for_the_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(SourceUnavailableError, match=f"port {port} is in use"):
            EmbeddedBroker(tmp_path, port=port).start()


def test_process_that_reused_a_brokers_pid_is_left_alone(tmp_path: Path, bystander: subprocess.Popen[bytes]) -> None:
    with EmbeddedBroker(tmp_path / "another") as running:
        for pid in (bystander.pid, running.pid(), 2**22 + 1):
            (tmp_path / "broker.pid").write_text(f"{pid}\n")
            end_broker_left_behind(tmp_path)

        assert bystander.poll() is None
        assert not is_gone(running.pid())
    for text in ("", "rubbish\n"):
        (tmp_path / "broker.pid").write_text(text)
        end_broker_left_behind(tmp_path)


def test_demonstration_ends_the_broker_of_a_killed_demonstration(tmp_path: Path) -> None:
    place = tmp_path / "demo"
    noted = place / "broker" / "broker.pid"
    environment = {**os.environ, "MILLPY_DEMO_PLACE": str(place)}

    def demonstrate() -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "examples.demo"]
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)

    with demonstrate() as first:
        until(lambda: noted.exists() and noted.read_text().endswith("\n"), "the first one's broker runs")
        pid = int(noted.read_text())
        first.kill()
    assert not is_gone(pid)

    with demonstrate() as second:
        try:
            until(lambda: is_gone(pid), "the second one ends it")
        finally:
            second.send_signal(signal.SIGTERM)
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_free_port_is_outside_the_range_of_outgoing_connections() -> None:
    # A broker that restarts after a kill would find it in use.
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])

    ports = {free_port() for _ in range(100)}

    assert max(ports) < first
    assert len(ports) > 90

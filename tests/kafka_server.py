"""A real Kafka broker for tests and benchmarks, when one can be had.

Looked for in this order: `kafka-broker` in the tools that lie beside the project (`../shared/tools`), an Apache Kafka
distribution in MILLPY_KAFKA_HOME, one whose `kafka-server-start.sh` is on PATH. Java 17 is needed for each.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT.parent / "shared" / "tools" / "kafka-broker"
NONE = "no Kafka broker can be had here"
START_S_MAX = 120
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
    "log.retention.ms": "-1",
    "auto.create.topics.enable": "false",
}


class NoKafkaError(Exception):
    """There is no broker to start."""


def distribution() -> Path | None:
    """Where an Apache Kafka distribution lies."""
    if home := os.environ.get("MILLPY_KAFKA_HOME"):
        return Path(home)
    script = shutil.which("kafka-server-start.sh")
    return Path(script).resolve().parents[1] if script else None


class KafkaServer:
    """One broker in a directory: `address` stays the same over `kill` and `start`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, again or for the first time; returns when it answers.

        Raises:
            NoKafkaError: there is none, or it cannot run here.
        """
        if TOOL.exists() and shutil.which("java"):
            port = [] if self.address else ["--port", "0"]
            done = self._tool("start", "--detach", "--set", "auto.create.topics.enable=false", *port)
            if done.returncode:
                raise NoKafkaError(done.stderr[-500:])
            self.address = done.stdout.split()[-1]
            return
        home = distribution()
        if home is None or not shutil.which("java"):
            raise NoKafkaError("neither the tools beside the project nor MILLPY_KAFKA_HOME, or no java")
        self._start_distribution(home)

    def _start_distribution(self, home: Path) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        properties = self.directory / "server.properties"
        if not self.address:
            ports = [_free_port(), _free_port()]
            self.address = f"127.0.0.1:{ports[0]}"
            settings = {
                **SETTINGS,
                "listeners": f"PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{ports[1]}",
                "advertised.listeners": f"PLAINTEXT://{self.address}",
                "controller.quorum.voters": f"1@127.0.0.1:{ports[1]}",
                "log.dirs": str(self.directory / "data"),
            }
            properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
            java = ["java", "-cp", f"{home}/libs/*", "kafka.tools.StorageTool", "format"]
            subprocess.run(
                [*java, "-t", "AAAAAAAAQACAAAAAAAAAAQ", "-c", str(properties)], check=True, capture_output=True
            )
        with (self.directory / "broker.log").open("ab") as log:
            java = ["java", "-Xmx512m", "-cp", f"{home}/libs/*", "kafka.Kafka", str(properties)]
            self._process = subprocess.Popen(java, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S_MAX
        while not _answers(self.address):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise NoKafkaError((self.directory / "broker.log").read_text()[-500:])
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL: a crash."""
        self._end("kill", signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self._end("stop", signal.SIGTERM)

    def _end(self, command: str, number: signal.Signals) -> None:
        if self._process is None:
            assert self._tool(command).returncode == 0
        elif self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(60)

    def _tool(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Popen's pipes are inherited by a detached broker; files are not waited for.
        out, err = self.directory.with_suffix(".out"), self.directory.with_suffix(".err")
        with out.open("w") as stdout, err.open("w") as stderr:
            words = [str(TOOL), command, "--dir", str(self.directory), *arguments]
            done = subprocess.run(words, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, check=False)
        return subprocess.CompletedProcess(words, done.returncode, out.read_text(), err.read_text())


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _answers(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True

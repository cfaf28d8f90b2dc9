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
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Lock

import trustme
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from millpy.embedded import free_port

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT.parent / "shared" / "tools" / "kafka-broker"
NONE = "no Kafka broker can be had here"
START_S_MAX = 120
QUICK_JAVA = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1"}
"""A test's broker has ended before the second compiler pays."""
USER, PASSWORD = "plant", "hunter2-tOp"
"""Who may log in where `KafkaServer.login` is; with PLAIN, and with SCRAM after `make_scram_user`."""
SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": (
        "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,PROXIED:PLAINTEXT,TLS:SSL,LOGIN:SASL_SSL"
    ),
    "inter.broker.listener.name": "PLAINTEXT",
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
    """One broker in a directory: its addresses stay the same over `kill` and `start`.

    Args:
        quick: whether it starts quickly rather than runs fast.

    Attributes:
        address: where it speaks plainly.
        proxied: the address that it names to those who come by `behind`; a proxy of a test listens there.
        behind: where that proxy finds it.
        tls: where it speaks TLS, with a certificate for 127.0.0.1 only.
        login: the same, for those who log in.
        fronting: held by the proxy that listens at `proxied`: cases of a broker run side by side.
        authority: file of the authority that vouches for the certificate; nobody else trusts it.
    """

    def __init__(self, directory: Path, *, quick: bool = False) -> None:
        self.directory = directory
        self.authority = directory.with_suffix(".ca.pem")
        self.address = self.tls = self.login = self.proxied = self.behind = ""
        self.fronting = Lock()
        self._keys = directory.with_suffix(".keys.pem")
        self._quick = quick
        self._settings: Mapping[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._runs = Event()
        self._ending = Lock()

    def start(self) -> None:
        """Start, again or for the first time; returns when it answers.

        Raises:
            NoKafkaError: there is none, or it cannot run here.
        """
        tool = TOOL.exists()
        if not (tool or distribution()) or not shutil.which("java"):
            raise NoKafkaError("neither the tools beside the project nor MILLPY_KAFKA_HOME, or no java")
        new = not self.address
        if new:
            self._make_settings()
        if tool:
            port = ["--port", self.address.rpartition(":")[2]]
            changes = [word for name, value in self._settings.items() for word in ("--set", f"{name}={value}")]
            done = self._tool("start", "--detach", *port, *changes)
            if done.returncode:
                raise NoKafkaError(done.stderr[-500:])
        else:
            self._start_distribution(new)
        self._runs.set()

    def await_running(self) -> None:
        """Wait until the case that has killed it has started it again: cases of a broker run side by side."""
        assert self._runs.wait(START_S_MAX), f"the broker at {self.address} was killed, and is not started again"

    def make_scram_user(self) -> None:
        """Let USER in with SCRAM-SHA-512 too."""
        command = ["kafka.admin.ConfigCommand", "--bootstrap-server", self.address, "--alter"]
        command += ["--add-config", f"SCRAM-SHA-512=[password={PASSWORD}]", "--entity-type", "users"]
        subprocess.run(
            ["java", "-cp", f"{jars()}/*", *command, "--entity-name", USER],
            check=True,
            capture_output=True,
            env=self._environment,
        )

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, **(QUICK_JAVA if self._quick else {})}

    def _make_settings(self) -> None:
        self.directory.mkdir(parents=True)
        certificate_for("127.0.0.1", self.authority, self._keys)
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(6)]
        self.address, control, self.tls, self.login, self.proxied, self.behind = addresses
        direct = f"PLAINTEXT://{self.address},TLS://{self.tls},LOGIN://{self.login}"
        module = "org.apache.kafka.common.security"
        self._settings = SETTINGS | {
            "listeners": f"{direct},PROXIED://{self.behind},CONTROLLER://{control}",
            "advertised.listeners": f"{direct},PROXIED://{self.proxied}",
            "controller.quorum.voters": f"1@{control}",
            # A client without a login may do everything; a user may do what no rule for others reserves.
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
            "allow.everyone.if.no.acl.found": "true",
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._keys),
            "listener.name.login.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.login.plain.sasl.jaas.config": (
                f'{module}.plain.PlainLoginModule required user_{USER}="{PASSWORD}";'
            ),
            "listener.name.login.scram-sha-512.sasl.jaas.config": f"{module}.scram.ScramLoginModule required;",
        }

    def _start_distribution(self, new: bool) -> None:
        properties, libraries = self.directory / "server.properties", jars()
        if new:
            settings = {**self._settings, "log.dirs": str(self.directory / "data")}
            properties.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
            java = ["java", "-cp", f"{libraries}/*", "kafka.tools.StorageTool", "format"]
            subprocess.run(
                [*java, "-t", "AAAAAAAAQACAAAAAAAAAAQ", "-c", str(properties)],
                check=True,
                capture_output=True,
                env=self._environment,
            )
        with (self.directory / "broker.log").open("ab") as log:
            java = ["java", "-Xmx512m", "-cp", f"{libraries}/*", "kafka.Kafka", str(properties)]
            self._process = subprocess.Popen(
                java, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self._environment
            )
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
        with self._ending:  # a case beside may have killed it, and starts it again
            self._runs.wait(START_S_MAX)
            self._runs.clear()
        if self._process is None:
            assert self._tool(command).returncode == 0
            for address in (
                self.address,
                self.tls,
                self.login,
                self.behind,
            ):  # the tool waits for less: its command line to go
                _await_free(address)
        elif self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(60)

    def _tool(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Popen's pipes are inherited by a detached broker; files are not waited for.
        out, err = self.directory.with_suffix(".out"), self.directory.with_suffix(".err")
        with out.open("w") as stdout, err.open("w") as stderr:
            words = [str(TOOL), command, "--dir", str(self.directory), *arguments]
            done = subprocess.run(
                words, stdout=stdout, stderr=stderr, stdin=subprocess.DEVNULL, check=False, env=self._environment
            )
        return subprocess.CompletedProcess(words, done.returncode, out.read_text(), err.read_text())


def certificate_for(name: str, authority: Path, keys: Path) -> None:
    """Write an authority, and a certificate with its key as Kafka reads them."""
    made = trustme.CA()
    issued = made.issue_cert(name)
    made.cert_pem.write_to_path(str(authority))
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    keys.write_bytes(text + b"".join(pem.bytes() for pem in issued.cert_chain_pems))


def jars() -> Path:
    """Return where Kafka's programs lie; the tool gets them when it first starts a broker. Raises NoKafkaError."""
    if TOOL.exists():
        home = os.environ.get("KAFKA_BROKER_HOME", Path.home() / ".cache" / "kafka-broker")
        got = sorted(Path(home).glob("jars-*"))
        if not got:
            raise NoKafkaError("the tool has started no broker yet")
        return got[-1]
    if (found := distribution()) is None:
        raise NoKafkaError("there is no distribution")
    return found / "libs"


def _await_free(address: str) -> None:
    """Return once an address is free again; a large process that was killed takes its time."""
    host, port = address.split(":")
    deadline = time.monotonic() + START_S_MAX
    while True:
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((host, int(port)))
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.02)


def _answers(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True

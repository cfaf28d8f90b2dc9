"""The compose stack under a name of its own: up, kill, wait, down."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "compose" / "compose.yaml"
PROJECT = "millpy-compose-test"
LONG_RUNNING = ("postgres", "mosquitto", "injector", "worker")
KILL_ALL = ("sh", "-c", "kill -9 -1")
"""Every process of the container but its init, which ends then; the engine starts the container again."""


class StackError(Exception):
    """The stack is broken; the message describes how."""


class Stack:
    """Docker Compose with our file, secrets in a directory, and free ports.

    Args:
        directory: for secrets and logs.
        ports: MQTT_PORT and POSTGRES_PORT on this host.
        graph: the graph's file.
    """

    def __init__(self, directory: Path, ports: Mapping[str, int], graph: Path) -> None:
        self.secrets = directory / "secrets"
        self.ports = ports
        self._log = directory / "containers.log"
        self._environment = {
            **os.environ,
            **{name: str(port) for name, port in ports.items()},
            "SECRETS": str(self.secrets),
            "GRAPHS": str(graph.parent),
            "GRAPH": graph.name,
            "MILLPY_IMAGE": f"{PROJECT}:latest",
        }

    def up(self) -> None:
        """Make secrets, build, start, and wait until all is well."""
        subprocess.run(
            [sys.executable, str(FILE.with_name("make_secrets.py")), str(self.secrets)], check=True, capture_output=True
        )
        self.compose("build", "--quiet", "migrate")
        self.compose("up", "--detach", "--quiet-pull")
        self.wait(120)

    def down(self) -> None:
        """Remove containers, network and volumes."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)

    def keep_logs(self) -> Path:
        """Write the logs of all containers to a file."""
        self._log.write_text(self.compose("logs", "--no-color", "--timestamps", check=False))
        return self._log

    def kill(self, service: str) -> str:
        """SIGKILL one container's processes; returns its name once it has died and was started again by itself."""
        container = self.compose("ps", "--quiet", service).split()[0]
        before = _inspected(container)
        subprocess.run(["docker", "exec", container, *KILL_ALL], check=False, capture_output=True)
        deadline = time.monotonic() + 60
        while (now := _inspected(container))["RestartCount"] == before["RestartCount"]:
            if time.monotonic() > deadline:
                raise StackError(f"{service} was killed and is not started again: {now['State']}")
            time.sleep(0.1)
        return str(now["Name"]).removeprefix("/")

    def wait(self, within_s: float) -> None:
        """Until every container is healthy."""
        deadline = time.monotonic() + within_s
        while sick := self._sick():
            if time.monotonic() > deadline:
                raise StackError(f"not healthy after {within_s:.0f} s: {', '.join(sick)}")
            time.sleep(0.5)

    def url(self, secret: str) -> SplitResult:
        """One of the addresses in the secrets."""
        return urlsplit((self.secrets / secret).read_text())

    def database_url(self) -> str:
        """Return the URL of the database from this host, for a reader."""
        inside = self.url("reader_database_url")
        outside = f"{inside.username}:{inside.password}@127.0.0.1:{self.ports['POSTGRES_PORT']}"
        return inside._replace(netloc=outside).geturl()

    def compose(self, *arguments: str, check: bool = True) -> str:
        """Run docker compose; its output.

        Raises:
            StackError: it failed, and `check` is true.
        """
        command = ["docker", "compose", "--project-name", PROJECT, "--file", str(FILE), *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, check=False)
        if check and done.returncode != 0:
            raise StackError(f"docker compose {' '.join(arguments)}: {done.stderr.strip()[-2_000:]}")
        return done.stdout

    def _sick(self) -> list[str]:
        containers = [_inspected(name) for name in self.compose("ps", "--all", "--quiet", *LONG_RUNNING).split()]
        sick = [c["Name"] for c in containers if c["State"].get("Health", {}).get("Status") != "healthy"]
        return sick if len(containers) >= len(LONG_RUNNING) else [*sick, "some are missing"]


def missing() -> str:
    """What this machine lacks; empty for nothing."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    asks: Sequence[tuple[Sequence[str], str]] = (
        (["docker", "info"], "the Docker engine does not answer"),
        (["docker", "compose", "version"], "Docker has no Compose v2"),
    )
    for command, complaint in asks:
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            return complaint
    return ""


def _inspected(container: str) -> dict[str, Any]:
    found = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True).stdout
    answer: dict[str, Any] = json.loads(found)[0]
    return answer

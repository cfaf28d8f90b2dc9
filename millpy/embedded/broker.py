"""An MQTT broker as a child process, for the demonstration, crash tests and tests."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Self

from millpy.config.extras import to_install
from millpy.embedded.parts import START_S_MAX, free_port, last_lines
from millpy.embedded.supervise import runs
from millpy.errors import ConfigError, SourceUnavailableError


class EmbeddedBroker:
    """An MQTT broker as a child process: mosquitto if installed, else the pure-Python amqtt (MQTT 3.1.1 only).

    Args:
        directory: the directory of its configuration, log and (mosquitto) persistent sessions.
        port: the port; 0 chooses a free one, which stays the same over `kill` and `start`.
        save_always: whether mosquitto saves each time it queues a message for an absent client, which is slow.
            Otherwise it saves once a minute and at `stop`. Either way `kill` loses the messages that a connected client
            has not acknowledged, unless `save` was called before.
        queued_max: the largest number of messages that mosquitto keeps for an absent client; it drops later ones.
    """

    host = "127.0.0.1"

    def __init__(
        self, directory: Path | str, *, port: int = 0, save_always: bool = False, queued_max: int = 1_000_000
    ) -> None:
        self.directory = Path(directory).expanduser().resolve()
        self.port = port or free_port()
        self.program = mosquitto_program()
        self._queued_max = queued_max
        self._saving = "1\nautosave_on_changes true" if save_always else "60"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def protocol(self) -> str:
        """The highest supported version of MQTT: "5" or "3.1.1"."""
        return "5" if self.program else "3.1.1"

    def start(self) -> None:
        """Start the broker and wait until it accepts connections.

        Raises:
            ConfigError: neither mosquitto nor amqtt is installed.
            SourceUnavailableError: its port is in use, or the broker does not start; the message quotes its log.
        """
        if _listens(self.host, self.port):  # or it would pass for the broker
            raise SourceUnavailableError(f"the embedded broker does not start: port {self.port} is in use")
        self.directory.mkdir(parents=True, exist_ok=True)
        log = self.directory / "broker.log"
        with log.open("ab") as out:
            # The broker is in our process group, so that Ctrl-C ends both.
            self._process = subprocess.Popen(self._command(), stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        (self.directory / "broker.pid").write_text(f"{self._process.pid}\n")
        deadline = time.monotonic() + START_S_MAX
        while not _listens(self.host, self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise SourceUnavailableError(f"the embedded broker does not start: {last_lines(log.read_text())}")
            time.sleep(0.02)

    def stop(self) -> None:
        """Terminate the broker; mosquitto saves its sessions."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the broker by SIGKILL."""
        self._end(signal.SIGKILL)

    def save(self) -> None:
        """Make mosquitto write its sessions and all their messages to disk, and wait for it."""
        assert self.program is not None, "only mosquitto saves sessions"
        assert self._process is not None, "the broker is not running"
        saved = self.directory / "mosquitto.db"
        before = saved.stat().st_mtime_ns if saved.exists() else 0
        self._process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + START_S_MAX
        while not saved.exists() or saved.stat().st_mtime_ns == before:
            if time.monotonic() > deadline:
                raise SourceUnavailableError(f"the embedded broker does not save to {saved}")
            time.sleep(0.01)

    def pid(self) -> int:
        """Return the process id of the running broker."""
        assert self._process is not None, "the broker is not running"
        return self._process.pid

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_S_MAX)
            self._process = None

    def _command(self) -> list[str]:
        if self.program is None:
            if find_spec("amqtt") is None:
                raise ConfigError(
                    "no embedded MQTT broker is installed", hint=f"install mosquitto, or {to_install('embedded')}"
                )
            configuration = self.directory / _AMQTT_FILE
            configuration.write_text(_AMQTT.format(host=self.host, port=self.port))
            return [
                sys.executable,
                "-c",
                "from amqtt.scripts.broker_script import main; main()",
                "-c",
                str(configuration),
            ]
        configuration = self.directory / _MOSQUITTO_FILE
        configuration.write_text(
            _MOSQUITTO.format(
                host=self.host,
                port=self.port,
                directory=self.directory,
                saving=self._saving,
                queued_max=self._queued_max,
            )
        )
        return [self.program, "-c", str(configuration)]


_MOSQUITTO_FILE, _AMQTT_FILE = "mosquitto.conf", "amqtt.yaml"
# The user counts only if root starts it.
_MOSQUITTO = """\
listener {port} {host}
allow_anonymous true
user root
persistence true
persistence_location {directory}/
autosave_interval {saving}
max_queued_messages {queued_max}
max_inflight_messages 0
max_queued_bytes 0
"""

_AMQTT = """\
listeners:
  default:
    type: tcp
    bind: {host}:{port}
plugins:
  amqtt.plugins.base.BaseAuthPlugin:  # admits every client; its AnonymousAuthPlugin keeps nothing for absent clients
"""


def mosquitto_program() -> str | None:
    """Return the path of mosquitto, or None. Debian installs it in /usr/sbin, which is not on every PATH."""
    return shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin:/opt/homebrew/sbin")


def end_broker_left_behind(directory: Path) -> None:
    """Kill the broker of a directory if it has outlived the process that started it.

    Raises:
        SourceUnavailableError: the broker does not end.
    """
    directory = directory.expanduser().resolve()
    try:
        pid = int((directory / "broker.pid").read_text())
    except (FileNotFoundError, ValueError):
        return

    def is_ours() -> bool:  # the number may belong to another process by now
        python = os.path.basename(sys.executable)
        called = [("mosquitto", _MOSQUITTO_FILE), (python, _AMQTT_FILE)]
        return any(runs(pid, program, str(directory / name)) for program, name in called)

    if not is_ours():
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + START_S_MAX
    while is_ours():
        if time.monotonic() > deadline:
            raise SourceUnavailableError(f"process {pid}, an orphaned broker, does not end")
        time.sleep(0.01)


def _listens(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return True
    except OSError:
        return False

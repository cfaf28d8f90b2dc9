"""The plant's machines: a disk of its own, PostgreSQL and a broker on it, `millpy run --workers 2`, and the publisher.

PostgreSQL has a service manager, as everywhere: a thread starts it when it has ended. The workers have none but
`millpy run` itself, which is started once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Self

from millpy.admin.events import list_events
from millpy.admin.queries import Admin
from millpy.embedded import EmbeddedBroker, EmbeddedPostgres
from millpy.embedded.parts import free_port
from millpy.errors import MillError
from millpy.store.postgres.deployment.migrate import migrate
from tests.plant.fleet import Options
from tests.plant.publisher import CLOSE

GRAPH_FILE = Path(__file__).with_name("graph.py")
ROOT = GRAPH_FILE.parents[2]
GRAPH = "plant"
WORKERS = 2
DISK_MB = 3_000
SERVER = {"max_wal_size": "256MB", "min_wal_size": "64MB"}
LOOK_S = 0.5
EVENTS_MAX = 200
HTTP_S_MAX = 8.0
DRAIN_S_MAX = 60.0
CATCHES_UP_S_MAX = 600.0
BEHIND_S = 2 * 900
"""How far a source's watermark may be behind what was published: `max_disorder`, and what a gateway collects."""


class Plant:
    """Everything that runs in the plant; a context.

    Attributes:
        has_own_disk: whether the database has a disk of a bounded size, which takes the right to mount one.
        peak_rss_mb: the largest resident memory of a worker so far.
        server_starts: how often the service manager has started PostgreSQL again.
        published: the newest tick that the broker has acknowledged; -1 before.
    """

    def __init__(self, directory: Path, options: Options) -> None:
        self.directory, self.options = directory, options
        self.peak_rss_mb, self.server_starts, self.published, self.closed = 0.0, 0, -1, False
        self.disk = directory / "disk"
        self.settings: dict[str, Any] = {"halls": ["hall1"], "relayed_lateness_h": 2}
        self._over = threading.Event()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.disk.mkdir(parents=True)
            self.has_own_disk = _mount(self.disk)
            if self.has_own_disk:
                stack.callback(subprocess.run, ["umount", "--lazy", str(self.disk)], check=False)
            self.server = stack.enter_context(EmbeddedPostgres(self.disk / "postgres", settings=SERVER))
            stack.callback(self.server.kill)
            self.url = self.server.url()
            migrate(self.url)
            self.broker = stack.enter_context(EmbeddedBroker(self.directory / "broker"))
            self.http = free_port()
            self.change_settings(port=self.broker.port)
            self._start(self._manage_server)
            self._start(self._measure)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(OSError):
            shutil.copy(self.disk / "postgres" / "log", self.directory / "postgres.log")
        for process in (getattr(self, "run", None), getattr(self, "publisher", None)):
            if process is not None and process.poll() is None:
                process.kill()  # its workers are on a leash
                process.wait()
        self._stack.close()

    # What an operator does.

    def change_settings(self, **settings: Any) -> None:
        """Edit the graph's file."""
        self.settings |= settings
        (self.directory / "settings.json").write_text(json.dumps(self.settings))

    def environment(self) -> dict[str, str]:
        """Return the environment of millpy's commands."""
        return {
            **os.environ,
            "MILLPY_DATABASE_URL": self.url,
            "PLANT_SETTINGS": str(self.directory / "settings.json"),
            "PYTHONPATH": str(ROOT),
        }

    def millpy(self, *arguments: str) -> str:
        """Run a command of millpy; return what it prints. Raises `CalledProcessError`."""
        command = [sys.executable, "-m", "millpy", *arguments]
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"millpy {' '.join(arguments)}: {done.returncode}, {done.stdout} {done.stderr}")
        return done.stdout

    def start(self) -> None:
        """Start the workers, once, and the publisher."""
        log = self._stack.enter_context((self.directory / "run.log").open("wb"))
        command = [sys.executable, "-m", "millpy", "run", str(GRAPH_FILE), "--workers", str(WORKERS)]
        command += ["--http", f"127.0.0.1:{self.http}"]
        self.run = subprocess.Popen(command, env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        options = {name: getattr(self.options, name) for name in ("devices", "every_s", "start", "with_hall")}
        self.publisher = subprocess.Popen(
            [sys.executable, "-m", "tests.plant.publisher", str(self.broker.port), json.dumps(options)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._start(self._follow_publisher)

    def drain(self) -> int:
        """Stop the workers in good order, and return the status of `millpy run`."""
        self.run.send_signal(signal.SIGTERM)
        return self.run.wait(DRAIN_S_MAX)

    def publish(self, what: str) -> None:
        """Let the devices publish a tick, or close the day."""
        assert self.publisher.stdin is not None
        self.publisher.stdin.write(f"{what}\n")
        self.publisher.stdin.flush()

    def caught_up(self, second: int) -> bool:
        """Tell whether every source has read what was published until a second of the day."""
        read = (
            "SELECT bool_and(low_watermark >= to_timestamp(:until)) AS done"
            " FROM millpy.watermarks WHERE computation = ANY (:sources)"
        )
        until = self.options.start + second - BEHIND_S
        sources = [row["stream"] for row in self.admin().sources(GRAPH)]
        return bool(self.admin().ask(read, until=until, sources=sources)[0]["done"])

    # What an operator sees.

    def admin(self) -> Admin:
        """Return what `millpy status` and the other commands query."""
        return Admin(self.url, statement_s_max=5.0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return what `millpy events --kind` shows."""
        return [dict(row) for row in list_events(self.admin(), GRAPH, start="", kinds=[kind], limit=EVENTS_MAX)]

    def metric(self, name: str, **labels: str) -> list[float]:
        """Return the values of a metric with these labels, at all workers that answer."""
        return [
            float(line.rpartition(" ")[2])
            for line in self.page("metrics").splitlines()
            if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items())
        ]

    def page(self, page: str) -> str:
        """Return a page of health or metrics; nothing if it is not answered."""
        url = f"http://127.0.0.1:{self.http}/{page}"
        with suppress(OSError):
            try:
                with urllib.request.urlopen(url, timeout=HTTP_S_MAX) as answer:
                    return str(answer.read().decode())
            except urllib.error.HTTPError as error:  # not ready, and says why
                return error.read().decode()
        return ""

    def worker_pids(self) -> list[int]:
        """Return the processes of the workers: the children of `millpy run`."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.run.pid and fields[0] != "Z":
                    found.append(int(stat.parent.name))
        return found

    # What runs beside.

    def _start(self, function: Callable[[], None]) -> None:
        threading.Thread(target=function, daemon=True, name=function.__name__).start()

    def _manage_server(self) -> None:
        while not self._over.wait(LOOK_S):
            if not (self.server.data / "postmaster.pid").exists() or not _accepts(self.server):
                with suppress(MillError, OSError):
                    self.server.restart()
                    self.server_starts += 1

    def _measure(self) -> None:
        while not self._over.wait(LOOK_S):
            for pid in self.worker_pids() if getattr(self, "run", None) else ():
                with suppress(OSError, StopIteration):
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
                    self.peak_rss_mb = max(self.peak_rss_mb, peak / 1_024)

    def _follow_publisher(self) -> None:
        out: IO[str] | None = self.publisher.stdout
        assert out is not None
        for line in out:
            what = line.split()[0]
            if what == CLOSE:
                self.closed = True
            else:
                self.published = int(what)


def until(condition: Callable[[], bool], within_s: float, every_s: float = 0.2) -> float | None:
    """Poll until a condition holds; return the seconds that it took, or None. Errors of millpy count as not yet."""
    started = time.monotonic()
    while time.monotonic() - started <= within_s:
        with suppress(MillError):
            if condition():
                return time.monotonic() - started
        time.sleep(every_s)
    return None


def _accepts(server: EmbeddedPostgres) -> bool:
    """Tell whether the postmaster lives; one that recovers from a crash lives, too."""
    try:
        os.kill(server.pid(), 0)
    except (MillError, OSError):
        return False
    return True


def _mount(place: Path) -> bool:
    """Mount a disk of a bounded size, if we may."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=0711", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def fill(ballast: Path) -> Iterator[int]:
    """Take all the room that is left on a disk, to the last page; yield what was taken."""
    for size in (4_000_000, 4_096):
        with suppress(OSError), ballast.open("ab", buffering=0) as file:
            while file.write(b"\0" * size):
                yield size

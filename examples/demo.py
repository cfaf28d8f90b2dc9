"""`make demo`: run a fleet, a broker, a database and two workers, kill one worker, and check every window.

At the end PySpark reads the windows and reports on them, and runs the same graph over the list of all readings, to
audit the windows. The exit status is 0 only if every window in SQL equals both recomputations, the too-late records add
up, and the report is written. With `--json`, standard output is one JSON
document with the figures, and everything else goes to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import paho.mqtt.publish as mqtt_publish
import psycopg

from examples.recompute import Recomputed, recompute
from millpy.embedded import EmbeddedBroker, EmbeddedPostgres, end_broker_left_behind
from millpy.errors import MillError
from millpy.observability.status_line import working
from millpy.process.exit import report_error
from millpy.process.launcher import worker_command
from millpy.process.page_process import page_beside
from millpy.store.postgres.deployment.migrate import migrate

ROOT = Path(__file__).resolve().parent.parent
GRAPH = ROOT / "examples" / "factory.py"
PLACE = Path(os.environ.get("MILLPY_DEMO_PLACE") or ROOT / ".millpy" / "demo")
DURATION_S = 60.0
PROGRESS_S = 3.0
READY_S_MAX = 120.0
CLOSING_S_MAX = 180.0
REPORT = PLACE / "report.html"
SPARK_S_MAX = 600.0
FOR_LITTLE_DATA = {
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.defaultJavaOptions": "-XX:TieredStopAtLevel=1",
}
"""Without these, Spark would spend most of its time compiling code that runs for a moment over some hundred rows."""

TABLE = """
    SELECT device, window_start, n, mean, high, late_count FROM factory.temperature_5s
"""
SAMPLE = """
    SELECT device, to_char(window_start AT TIME ZONE 'UTC', 'HH24:MI:SS') AS starts, n,
           round(mean::numeric, 3) AS mean, high, pane_index AS pane, pane_timing AS timing, late_count AS late
      FROM factory.temperature_5s WHERE device IN ('sensor-03', 'sensor-04', 'sensor-05')
     ORDER BY device, window_start
"""
PROGRESS = """
    SELECT count(*), coalesce(sum(n), 0)::bigint, coalesce(sum(late_count), 0)::bigint FROM factory.temperature_5s
"""


class DemoError(Exception):
    """The demonstration failed; the message says why."""


@dataclass(frozen=True, slots=True)
class Compared:
    """The counts of published records and of windows, and the number of windows that differ from the recomputation."""

    published: int
    duplicates: int
    late: int
    too_late: int
    too_late_recomputed: int
    windows: int
    differences: int

    @property
    def passed(self) -> bool:
        """Tell whether every window and count equals its recomputation."""
        return self.windows > 0 and self.differences == 0 and self.too_late == self.too_late_recomputed


def main() -> int:
    """Run the demonstration, and return its exit status."""
    as_json = "--json" in sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w")
    if as_json:
        os.dup2(2, 1)  # also for the processes that this one starts
    started = time.monotonic()
    logging.getLogger("paho").addHandler(logging.NullHandler())  # it warns about clients that disconnect
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        end_broker_left_behind(PLACE / "broker")  # left by a killed demonstration
        shutil.rmtree(PLACE, ignore_errors=True)
        PLACE.mkdir(parents=True)
        with ExitStack() as stack:
            found = demonstrate(stack)
    except DemoError as error:
        return report_error(MillError(f"demo: {error}", hint=f"the workers' logs are in {PLACE}"), as_json=as_json)
    except MillError as error:
        return report_error(error, as_json=as_json)
    except KeyboardInterrupt:
        return 130
    if as_json:
        seconds = round(time.monotonic() - started, 1)
        document = {"passed": found.passed, **asdict(found), "seconds": seconds, "report": str(REPORT)}
        print(json.dumps(document, indent=2), file=answer, flush=True)
    return 0 if found.passed else 1


def demonstrate(stack: ExitStack) -> Compared:
    """Start everything, kill a worker half way, wait for the last window, compare."""
    with working("starting a database and a broker"):
        server = stack.enter_context(EmbeddedPostgres(PLACE / "postgres"))
        broker = stack.enter_context(EmbeddedBroker(PLACE / "broker"))
        migrate(server.url())
    program = "mosquitto" if broker.program else "amqtt (mosquitto is not installed)"
    say(f"PostgreSQL {server.version} and {program} (port {broker.port}) are up")
    workers = [stack.enter_context(worker(number, server.url(), broker)) for number in (1, 2)]
    connection = stack.enter_context(psycopg.connect(server.url(), autocommit=True))
    with working("two workers start, and subscribe"):
        wait_until_subscribed(connection, broker, workers)
    say("two workers run examples/factory.py and are subscribed")
    if find_spec("fastapi") and find_spec("uvicorn") and find_spec("jinja2"):
        settings = [name for name in os.environ if name.startswith("MILLPY_")]
        stack.enter_context(page_beside(server.url(), left_out=settings))
        say("the page is served until the end; its link follows")

    own_list = PLACE / "published.ndjson"
    publisher = stack.enter_context(
        process("examples.fleet", str(broker.port), broker.protocol, str(DURATION_S), str(own_list))
    )
    say(f"the fleet publishes for {DURATION_S:.0f} s: 40 devices, out of order, duplicates, quiet devices")
    # amqtt forgets messages that a dead client has not acknowledged, so with amqtt the other worker has to die.
    watch(connection, publisher, workers, own_list, faithful=broker.program is not None)
    if publisher.returncode != 0:
        raise DemoError(f"the publisher failed with status {publisher.returncode}")

    expected = recompute(own_list)
    say("the fleet is silent; the clock closes the last windows after 10 s of quiet")
    with working("waiting for the last windows"):
        wait_for_windows(connection, expected, workers)
    show(connection)
    found = compare(connection, expected)
    report(server.url())
    audit(server.url(), own_list)
    return found


def watch(
    connection: psycopg.Connection,
    publisher: subprocess.Popen[bytes],
    workers: list[subprocess.Popen[bytes]],
    own_list: Path,
    *,
    faithful: bool,
) -> None:
    """Print progress until the publisher ends; SIGKILL one worker half way.

    A `faithful` broker resends messages that a dead client had not acknowledged.
    """
    started = time.monotonic()
    while publisher.poll() is None:
        time.sleep(PROGRESS_S)
        elapsed = time.monotonic() - started
        published = own_list.read_bytes().count(b"\n") if own_list.exists() else 0
        print(f"{elapsed:5.0f} s  published {published:6}   {progress(connection)}", flush=True)
        alive = [process for process in workers if process.poll() is None]
        if elapsed >= DURATION_S / 2 and len(alive) == len(workers):
            victim = victim_among(connection, workers, with_injector=faithful)
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            say(f"SIGKILL: the worker that {'reads from' if faithful else 'does not read from'} the broker is dead")
        elif not alive:
            raise DemoError("no worker is left")


def progress(connection: psycopg.Connection) -> str:
    """Return one line with the present counts in SQL."""
    windows, records, late = row(connection, PROGRESS)
    return f"windows in SQL {windows:5}   records in them {records:6}   late ones {late:4}"


def wait_until_subscribed(
    connection: psycopg.Connection, broker: EmbeddedBroker, workers: list[subprocess.Popen[bytes]]
) -> None:
    """Send junk until it becomes a dead letter: a broker keeps nothing for a session that does not exist yet."""

    def junk_arrived() -> bool:
        with suppress(OSError):
            mqtt_publish.single("sensors/junk/reading", b"not JSON", qos=1, hostname=broker.host, port=broker.port)
        with suppress(psycopg.errors.UndefinedTable):
            return row(connection, "SELECT count(*) FROM mill.dead_letters")[0] > 0
        return False

    wait(junk_arrived, READY_S_MAX, workers, "the workers do not subscribe")


def wait_for_windows(
    connection: psycopg.Connection, expected: Recomputed, workers: list[subprocess.Popen[bytes]]
) -> None:
    """Wait until SQL has as many windows as the recomputation; `compare` judges them."""

    def closed() -> bool:
        return row(connection, "SELECT count(*) FROM factory.temperature_5s")[0] >= len(expected.windows)

    with suppress(DemoError):
        wait(closed, CLOSING_S_MAX, workers, "windows are missing")
    print(f"         published {expected.published:6}   {progress(connection)}", flush=True)


def wait(done: Callable[[], bool], seconds: float, workers: list[subprocess.Popen[bytes]], otherwise: str) -> None:
    """Poll a condition; raise when a worker fails meanwhile, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while not done():
        failed = [process for process in workers if (process.poll() or 0) > 0]
        if failed:
            raise DemoError(f"a worker failed with status {failed[0].returncode}")
        if time.monotonic() > deadline:
            raise DemoError(f"{otherwise} after {seconds:.0f} s")
        time.sleep(0.25)


def victim_among(
    connection: psycopg.Connection, workers: list[subprocess.Popen[bytes]], *, with_injector: bool
) -> subprocess.Popen[bytes]:
    """Return the worker that owns the source partition, or one that does not."""
    statement = """
        SELECT w.pid FROM mill.intervals AS i
          JOIN mill.computations AS c USING (computation_id)
          JOIN mill.workers AS w ON w.worker_id = i.worker_id
         WHERE c.kind = 'injector'
    """
    pids = {pid for (pid,) in connection.execute(statement)}
    return next((process for process in workers if (process.pid in pids) == with_injector), workers[0])


def show(connection: psycopg.Connection) -> None:
    """Print the windows of three devices (one falls quiet, one starts late) as SQL shows them."""
    cursor = connection.execute(SAMPLE)
    assert cursor.description is not None
    lines = [tuple(column.name for column in cursor.description), *(tuple(map(str, line)) for line in cursor)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    print("\nSELECT * FROM factory.temperature_5s  -- three of the forty devices")
    for line in lines:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def compare(connection: psycopg.Connection, expected: Recomputed) -> Compared:
    """Compare every window in SQL with its recomputation, and count the records that were too late for any window."""
    actual = {(device, start): tuple(values) for device, start, *values in connection.execute(TABLE)}
    differences = []
    for key in sorted(actual.keys() | expected.windows.keys()):
        wanted = expected.windows[key].row() if key in expected.windows else None
        if not equal(actual.get(key), wanted):
            differences.append(f"{key[0]} {key[1].isoformat()}: in SQL {actual.get(key)}, recomputed {wanted}")
    for line in differences[:20]:
        print(f"  DIFFERENT {line}")
    too_late = row(connection, "SELECT count(*) FROM mill.late_records")[0]
    late = sum(window.late for window in expected.windows.values())
    print(
        f"published {expected.published} ({expected.duplicates} of them twice), late but in time {late}, "
        f"too late {too_late} in mill.late_records (recomputed: {expected.too_late})"
    )
    print(f"{len(expected.windows)} windows, {len(differences)} differences")
    return Compared(
        published=expected.published,
        duplicates=expected.duplicates,
        late=late,
        too_late=too_late,
        too_late_recomputed=expected.too_late,
        windows=len(expected.windows),
        differences=len(differences),
    )


def report(url: str) -> None:
    """Report on the devices with PySpark: print the report, and write it as a page."""
    say("PySpark reads the windows: millpy report factory.temperature_5s --value mean --html ...")
    print(flush=True)
    millpy_with_spark(url, "report", "factory.temperature_5s", "--value", "mean", "--html", str(REPORT))
    print()


def audit(url: str, own_list: Path) -> None:
    """Recompute with PySpark, and compare every window that can no longer change."""
    say("PySpark runs examples/factory.py over all that was published: millpy audit examples/factory.py --input ...")
    millpy_with_spark(url, "audit", str(GRAPH), "--input", str(own_list))


def millpy_with_spark(url: str, *arguments: str) -> None:
    """Run a command of millpy that starts Spark.

    Raises:
        DemoError: it fails, or takes too long.
    """
    settings = [part for name, value in FOR_LITTLE_DATA.items() for part in ("--conf", f"{name}={value}")]
    environment = {"MILLPY_DATABASE_URL": url, "PYSPARK_SUBMIT_ARGS": " ".join([*settings, "pyspark-shell"])}
    command = [sys.executable, "-m", "millpy", *arguments]
    try:
        done = subprocess.run(
            command, env={**surroundings(), **environment}, cwd=ROOT, check=False, timeout=SPARK_S_MAX
        )
    except subprocess.TimeoutExpired:
        raise DemoError(f"millpy {arguments[0]} takes more than {SPARK_S_MAX:.0f} s") from None
    if done.returncode != 0:
        raise DemoError(f"millpy {arguments[0]} failed with status {done.returncode}")


def surroundings() -> dict[str, str]:
    """Return the environment without millpy's settings, which may name another database or broker."""
    return {name: value for name, value in os.environ.items() if not name.startswith("MILLPY_")}


def equal(actual: tuple[object, ...] | None, wanted: tuple[int, float, float, int] | None) -> bool:
    """Compare counts and maxima exactly, means to 1e-9: sums of floats depend on their order."""
    if actual is None or wanted is None:
        return False
    n, mean, high, late = actual
    assert isinstance(mean, float)
    return (n, high, late) == (wanted[0], wanted[2], wanted[3]) and abs(mean - wanted[1]) <= 1e-9 * abs(wanted[1])


@contextmanager
def worker(number: int, url: str, broker: EmbeddedBroker) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker process; drain it at the end if it still runs."""
    environment = {
        **surroundings(),
        "MILLPY_DATABASE_URL": url,
        "MILLPY_MQTT_URL": f"mqtt://{broker.host}:{broker.port}",
        "FACTORY_MQTT_PROTOCOL": "5" if broker.protocol == "5" else "311",
    }
    with (PLACE / f"worker-{number}.log").open("wb") as log:
        child = subprocess.Popen(
            worker_command(str(GRAPH)), stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, cwd=ROOT
        )
        yield from ended(child)


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python module in a child process."""
    child = subprocess.Popen([sys.executable, "-m", module, *arguments], stdin=subprocess.DEVNULL, cwd=ROOT)
    yield from ended(child)


def ended(child: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the child process, and end it afterwards."""
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdin is not None:
            child.stdin.close()


def row(connection: psycopg.Connection, statement: str) -> tuple[int, ...]:
    """Return the only row of a query."""
    found = connection.execute(statement).fetchone()
    assert found is not None
    return tuple(found)


def say(text: str) -> None:
    """Print what happens next."""
    print(f"== {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

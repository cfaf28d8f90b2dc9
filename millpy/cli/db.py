"""`millpy db`: keep the embedded PostgreSQL up on a TCP port, for psql, DBeaver, Grafana and notebooks."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import GraphArgument, JsonOption, handle_errors, print_json, settings_of
from millpy.embedded import EmbeddedPostgres, embedded_directory, free_port
from millpy.embedded.parts import START_S_MAX
from millpy.embedded.server_user import make_own
from millpy.embedded.supervise import postmaster
from millpy.errors import MillError, StoreUnavailableError, UsageError
from millpy.observability.status_line import working

log = logging.getLogger(__name__)
LOCK, PORT = "db.lock", "port"
CHECK_EVERY_S = 1.0
ANY_ADDRESS = ("*", "0.0.0.0", "::")


@handle_errors
def db(
    graph: GraphArgument = None,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="N",
            min=0,
            max=65_535,
            show_default=False,
            help="TCP port; default: the one from last time, else a free one.",
        ),
    ] = 0,
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on; other machines reach it, unless it is a local one."
        ),
    ] = "127.0.0.1",
    restart: Annotated[
        bool, typer.Option("--restart", help="Restart a server that workers use without TCP; they connect again.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep the embedded PostgreSQL of a graph up on a TCP port, until Ctrl-C or SIGTERM.

    Prints its URL with the password, which is in .millpy/postgres/password, too.
    """
    if settings_of(None).database_url is not None:
        raise UsageError(
            "MILLPY_DATABASE_URL names a PostgreSQL of your own", hint="connect to that, or unset it and try again"
        )
    directory = embedded_directory(graph).expanduser().resolve()
    make_own(directory)
    ends = threading.Event()
    with ExitStack() as stack:
        lock = stack.enter_context(_locked(directory / LOCK))
        number = _port(directory, host, port)
        server = EmbeddedPostgres(directory, tcp=True, host=host, port=number)
        with working(f"starting the database in {directory}"):
            stack.callback(server.release)
            server.start()
            _listen(server, number, port, host, restart=restart)
            from millpy.store.postgres.deployment.migrate import migrate  # late: --help does not need it

            migrate(server.url())
        stack.enter_context(_signals(ends))
        address = server.tcp_url(host=socket.gethostname() if host in ANY_ADDRESS else host)
        used = int(address.rpartition(":")[2].partition("/")[0])
        (directory / PORT).write_text(f"{used}\n")
        os.truncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()} {host}:{used}\n".encode(), 0)
        if as_json:
            print_json({"url": address, "host": host, "port": used, "directory": str(directory)})
        else:
            tables.say(address)
            tables.say(f"psql '{address}'   # stays up until Ctrl-C or SIGTERM")
        _keep_up(server, ends)
    if not as_json:
        tables.say("released; the database stops, unless workers use it")


def _listen(server: EmbeddedPostgres, number: int, asked: int, host: str, *, restart: bool) -> None:
    """Check that the server, which may have been running before, listens as asked; restart it if that is allowed."""
    address = server.listens()
    wanted = "*" if host in ANY_ADDRESS else host
    found = "*" if address in ANY_ADDRESS else address
    if found and found == wanted and (not asked or server.url().endswith(f"port={number}")):
        return
    if not restart:
        how = f"on {address} with another port or address" if address else "without TCP"
        raise UsageError(
            f"the database in {server.directory} runs already, {how}: other processes use it",
            hint="stop them first, start `millpy db` before them, or give --restart: workers connect again",
        )
    server.listen()


def _port(directory: Path, host: str, asked: int) -> int:
    """Return the port to listen on: the one asked for, else the one from last time if it is free, else a free one."""
    runs = postmaster(directory / "data") is not None  # then its own port is not free
    if asked:
        if not runs and not _is_free(host, asked):
            raise UsageError(f"port {asked} of {host} is in use, or not yours", hint="give another --port, or none")
        return asked
    with suppress(FileNotFoundError, ValueError):
        before = int((directory / PORT).read_text())
        if _is_free(host, before):
            return before
    found = free_port()
    if not _is_free(host, found):
        raise UsageError(f"cannot listen on {host}", hint="give an address of this machine: --host 127.0.0.1")
    return found


def _is_free(host: str, port: int) -> bool:
    address = "" if host in ANY_ADDRESS else host
    try:
        kind, *_, where = socket.getaddrinfo(address or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except (socket.gaierror, UnicodeError):
        raise UsageError(f"{host!r} is no address", hint="for example --host 127.0.0.1") from None
    except OSError:
        return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Hold the lock of the directory, which the kernel releases when this process ends in any way."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid, _, where = os.pread(descriptor, 200, 0).decode(errors="replace").strip().partition(" ")
            raise UsageError(
                f"`millpy db` serves {path.parent} already" + (f" on {where} (process {pid})" if where else ""),
                hint="use that one, or end it first",
            ) from None
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _signals(ends: threading.Event) -> Iterator[None]:
    before = {
        number: signal.signal(number, lambda *_: ends.set())
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _keep_up(server: EmbeddedPostgres, ends: threading.Event) -> None:
    """Wait for the end; start the server again if it crashes."""
    pause_s = CHECK_EVERY_S
    while not ends.wait(pause_s):
        if postmaster(server.data) is not None:
            pause_s = CHECK_EVERY_S
            continue
        if not server.data.exists():
            raise StoreUnavailableError(f"{server.data} is gone", hint="`millpy db` makes a new database")
        log.warning("the database has ended; starting it again")
        try:
            server.restart()
        except MillError as error:
            if isinstance(error, StoreUnavailableError):
                log.warning("%s", error.message)
                pause_s = min(pause_s * 2, START_S_MAX)
                continue
            raise

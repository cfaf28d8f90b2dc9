"""`millpy ui`: serve the page to the user of this machine, and open it in a browser."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import webbrowser
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from millpy.admin import tokens
from millpy.admin.queries import Admin
from millpy.admin.tokens import Role
from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, GraphArgument, JsonOption, handle_errors, print_json, settings_of
from millpy.clock import random_id
from millpy.config.extras import to_install
from millpy.config.secrets import is_other_machine
from millpy.errors import ConfigError, MillError, UsageError

if TYPE_CHECKING:
    from millpy.api.configuration import ApiConfiguration

KEPT = timedelta(days=31)
READ_BYTES = 4096
OPENED = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={link}">
<title>millpy</title>
<a href="{link}">Open the page</a>
"""


@handle_errors
def ui(
    graph: GraphArgument = None,
    http: Annotated[
        str, typer.Option("--http", metavar="ADDRESS", help="Address; default: MILLPY_API, else 127.0.0.1:8090.")
    ] = "",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open it in a browser; only from a terminal.")
    ] = True,
    leash: Annotated[bool, typer.Option("--leash", hidden=True, help="End when standard input ends.")] = False,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Serve the page on this machine until a signal ends it, and print a link that logs in."""
    check_installed()
    from millpy.api.configuration import configuration
    from millpy.process.launcher import database as connected

    if leash:
        threading.Thread(target=_end_with_input, daemon=True).start()
    settings = settings_of(database, api=http)
    with connected(settings, graph, create=False) as url:
        found = configuration(settings, url)
        if not found.address[0] or is_other_machine(found.address[0]):
            raise UsageError("`millpy ui` serves this machine only", hint="`millpy api` serves others, who log in")
        opens = browser and sys.stderr.isatty()
        _serve(found, graph, opens=opens, as_json=as_json)


def check_installed() -> None:
    """Check that what the page needs is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        import millpy.api.server
        import millpy.ui.site  # noqa: F401 - needs optional dependencies
    except ImportError as error:
        raise ConfigError("the page is not installed", hint=to_install("api")) from error


def _serve(found: ApiConfiguration, graph: str | None, *, opens: bool, as_json: bool) -> None:
    from millpy.api.server import serve_api
    from millpy.ui.entrance import local_site

    # uvicorn raises the signal again when it has ended: without a handler, that would end the process here.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal is closed; nohup ignores that
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    code = secrets.token_urlsafe(32)
    admin = Admin(found.operator_url)
    row, token = tokens.create(admin, f"millpy ui {os.getpid()} {random_id().hex[:8]}", Role.ADMIN, kept=KEPT)

    def served(address: str) -> None:
        link = f"{address}/enter?code={code}"
        if as_json:
            print_json({"address": address, "link": link})
        else:
            tables.say(f"the page: {link}")
        sys.stdout.flush()
        if opens:
            webbrowser.open(_written(link, directory).as_uri())

    with TemporaryDirectory(prefix="millpy-ui-") as directory:
        try:
            serve_api(
                replace(found, identity_header="", proxies=(), cookie_of_port=True), local_site(code, token), served
            )
        finally:
            with suppress(MillError):  # the database may have gone; the token ends by itself
                tokens.revoke(admin, row["name"])


def _written(link: str, directory: str) -> Path:
    """Write a file that leads to the link: other users of the machine see the command line of a browser."""
    path = Path(directory) / "open.html"
    path.touch(mode=0o600)
    path.write_text(OPENED.format(link=escape(link)))
    return path


def _end_with_input() -> None:
    while os.read(0, READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

"""A real API: `python -m services.api` as a process of its own, and a client that speaks HTTP/1.1 to it."""

from __future__ import annotations

import http.client
import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from millpy.admin.queries import Admin
from millpy.admin.tokens import Role, create

ROOT = Path(__file__).resolve().parents[1]
START_S_MAX = 60


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def rows(self) -> list[dict[str, Any]]:
        assert self.status == 200, (self.status, self.body)
        found: list[dict[str, Any]] = self.json["rows"]
        return found


class ApiServer:
    """A running API; `url` is its address, `process` the process."""

    def __init__(self, url: str, process: subprocess.Popen[str], lines: list[str], database_url: str) -> None:
        parts = urlsplit(url)
        self.url, self.host, self.port = url, str(parts.hostname), int(parts.port or 0)
        self.process = process
        self.lines = lines
        self.database_url = database_url

    def connect(self, timeout_s: float = 30) -> http.client.HTTPConnection:
        if self.url.startswith("https"):
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def send(
        self,
        method: str,
        path: str,
        token: str = "",
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> Answer:
        """Send one request, with its body as JSON unless it is bytes."""
        given = dict(headers or {})
        if token:
            given["Authorization"] = f"Bearer {token}"
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        if data is not None:
            given.setdefault("Content-Type", "application/json")
        words = {name.rstrip("_"): value for name, value in query.items() if value is not None}
        target = quote(path, safe="/%:@") + (f"?{urlencode(words, doseq=True)}" if words else "")
        connection = self.connect()
        try:
            connection.request(method, target, data, given)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, token: str = "", **query: Any) -> Answer:
        return self.send("GET", path, token, **query)

    def post(self, path: str, token: str = "", body: Any = None, **more: Any) -> Answer:
        return self.send("POST", path, token, {} if body is None else body, **more)

    def token(self, name: str, role: Role = Role.VIEWER, **more: Any) -> str:
        return create(Admin(self.database_url), name, role, **more)[1]


@contextmanager
def running_api(database_url: str, **environment: str) -> Iterator[ApiServer]:
    """An API for a database, on a free port."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLPY_")}
    given = {
        **kept,
        "MILLPY_DATABASE_URL": database_url,
        "MILLPY_API": "127.0.0.1:0",
        "MILLPY_LOG_FORMAT": "json",
        "PYTHONPATH": str(ROOT),
        **environment,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.api"], env=given, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if "the API is served" in line:
                ready.set()
        ready.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert ready.wait(START_S_MAX), lines
        found = re.search(r"(https?://[^/]+)/v1", "".join(lines))
        assert found, "".join(lines)
        yield ApiServer(found[1], process, lines, database_url)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        reader.join()
        assert process.stderr is not None
        process.stderr.close()

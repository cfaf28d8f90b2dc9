"""A schema registry for tests, with the interface of Confluent's: it registers, finds and returns schemas over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

UNKNOWN = {"error_code": 40403, "message": "Schema not found"}


class RegistryServer:
    """Schemas by subject; ids from 1 on.

    Attributes:
        refuses: answers of a schema that is to be registered: a status and a message; None accepts it.
        subjects: subject -> the ids of its schemas.
        fails: the status with which every request fails; 0 for none.
    """

    def __init__(self) -> None:
        self.url = ""
        self.schemas: list[str] = []
        self.subjects: dict[str, list[int]] = {}
        self.refuses: tuple[int, str] | None = None
        self.fails = 0
        self.requests = 0

    def answer(self, method: str, path: str, sent: Any) -> tuple[int, Any]:
        """Return the status and the content for a request."""
        self.requests += 1
        _, *words = path.split("/")
        if self.fails:
            return self.fails, {"error_code": self.fails, "message": "not now"}
        if method == "GET" and words[:2] == ["schemas", "ids"]:
            number = int(words[2])
            return (200, {"schema": self.schemas[number - 1]}) if 0 < number <= len(self.schemas) else (404, UNKNOWN)
        subject, schema = words[1], sent["schema"]
        known = [number for number in self.subjects.get(subject, ()) if self.schemas[number - 1] == schema]
        if known:
            return 200, {"id": known[0]}
        if words[2:] != ["versions"]:
            return 404, UNKNOWN
        if self.refuses is not None:
            return self.refuses[0], {"error_code": self.refuses[0], "message": self.refuses[1]}
        if schema not in self.schemas:
            self.schemas.append(schema)
        self.subjects.setdefault(subject, []).append(self.schemas.index(schema) + 1)
        return 200, {"id": self.subjects[subject][-1]}


@contextmanager
def schema_registry() -> Iterator[RegistryServer]:
    """Run a registry at a free port."""
    registry = RegistryServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer("GET", None)

        def do_POST(self) -> None:
            self._answer("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, method: str, sent: Any) -> None:
            status, content = registry.answer(method, self.path, sent)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        registry.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield registry
        finally:
            server.shutdown()
            thread.join()

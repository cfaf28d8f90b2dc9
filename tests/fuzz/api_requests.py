"""Requests made from an OpenAPI document, by a seed: right ones, and such as nobody should send."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, quote_from_bytes

from tests.fuzz.texts import WEIRD_NUMBERS, WEIRD_TEXTS, WEIRD_TIMES, WEIRD_UUIDS

HOSTILE = (
    "../../../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%00", "'; DROP TABLE mill.graphs; --", "' OR '1'='1",
    "<script>alert(1)</script>", "\u202eabc", "\x1b[31m", "{{7*7}}", "$1", ":graph", "%s%(x)s", "\\", "a" * 201,
    "b" * 10_001, "[" * 3_000, '["' + "x" * 50 + '"]', '["a","b"]', "[]", "[1]", "null", "\ufffe", "\U0010ffff", "+",
    "&", "=", "n=1", "device=", "=x", "n=x", "window_start=2026", "infinity", "-infinity", "epoch", "now", "today",
    "-1", "0", "1001", "9223372036854775808", "1e5", "true", "on", "plant.temperature_1m", "PLANT", "p%lant",
)  # fmt: skip
WEIRD = (*HOSTILE, *WEIRD_TEXTS, *WEIRD_NUMBERS, *WEIRD_TIMES, *WEIRD_UUIDS)
RIGHT = 0.75
"""Of the values, so that many a request reaches the database."""


@dataclass(frozen=True)
class MadeRequest:
    """A request, and the path of the document that it is made from."""

    method: str
    template: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


class RequestMaker:
    """Makes requests.

    Args:
        document: the OpenAPI document.
        known: parameter or field -> values that exist.
        seed: of the random numbers.
    """

    def __init__(self, document: Mapping[str, Any], known: Mapping[str, Sequence[Any]], seed: str) -> None:
        self._schemas = document["components"]["schemas"]
        self._operations = [
            (path, method, found) for path, methods in document["paths"].items() for method, found in methods.items()
        ]
        self._known = known
        self._random = random.Random(seed)

    def request(self) -> MadeRequest:
        """Return the next request."""
        path, method, found = self._random.choice(self._operations)
        target, words = path, []
        for parameter in found.get("parameters", ()):
            name = parameter["name"]
            if parameter["in"] == "path":
                target = target.replace(f"{{{name}}}", self._quoted(self._value(name, parameter["schema"])))
            elif parameter["in"] == "query" and self._random.random() < 0.4:
                times = 25 if self._random.random() < 0.02 else self._random.choice((1, 1, 1, 2))
                words += [f"{name}={self._quoted(self._value(name, parameter['schema']))}" for _ in range(times)]
        if self._random.random() < 0.05:
            words.append(f"{self._quoted(self._weird())}={self._quoted(self._weird())}")
        if self._random.random() < 0.03:
            method = self._random.choice(("get", "post", "put", "patch", "delete", "head", "options", "trace"))
        body, headers = None, {}
        if "requestBody" in found:
            body = self._body(found["requestBody"]["content"]["application/json"]["schema"])
            headers["Content-Type"] = "text/plain" if self._random.random() < 0.03 else "application/json"
        return MadeRequest(method.upper(), path, "?".join([target, *filter(None, ["&".join(words)])]), body, headers)

    def _body(self, schema: Mapping[str, Any]) -> bytes:
        kind = self._random.random()
        if kind < 0.05:
            return self._random.randbytes(self._random.randint(0, 100))
        if kind < 0.08:
            return self._random.choice((b"", b"[" * 20_000, b'{"a":' * 5_000, b"{}", b"null", b'"x"', b"\xff\xfe{}"))
        text = json.dumps(self._json(schema), ensure_ascii=self._random.random() < 0.5)
        data = text.encode(errors="surrogatepass")
        return data[: self._random.randint(0, len(data))] if kind < 0.12 else data

    def _json(self, schema: Mapping[str, Any], name: str = "") -> Any:
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if schema.get("type") == "object":
            fields = schema.get("properties", {})
            given = {
                one: self._json(its, one)
                for one, its in fields.items()
                if self._random.random() < (0.95 if one in schema.get("required", ()) else 0.4)
            }
            return given | ({"other": 1} if self._random.random() < 0.03 else {})
        if self._random.random() > RIGHT:
            return self._random.choice(
                (None, [], {}, True, 0.5, -1, 10**30, self._weird(), [self._weird()], float("nan"))
            )
        if schema.get("type") == "array":
            return [self._json(schema["items"], name) for _ in range(self._random.choice((1, 2, 30)))]
        if name == "payload_base64":
            return base64.b64encode(self._random.randbytes(30)).decode()
        return self._value(name, schema)

    def _value(self, name: str, schema: Mapping[str, Any]) -> Any:
        if self._random.random() > RIGHT:
            return self._weird()
        if name in self._known:
            return self._random.choice(self._known[name])
        kinds = [one.get("type") for one in schema.get("anyOf", [schema])]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        if "boolean" in kinds:
            return self._random.choice((True, False))
        if "integer" in kinds or "number" in kinds:
            return self._random.choice((1, 2, 3, 100, 1_000))
        return self._random.choice(("", "a", self._weird()))

    def _weird(self) -> str:
        return self._random.choice(WEIRD)

    def _quoted(self, value: Any) -> str:
        text = json.dumps(value) if isinstance(value, bool) else str(value)
        if self._random.random() < 0.02:
            return quote_from_bytes(self._random.randbytes(12))
        return quote(text.encode(errors="surrogatepass"), safe="/" if self._random.random() < 0.1 else "")

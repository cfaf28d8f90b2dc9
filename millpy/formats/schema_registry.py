"""A registry of schemas with the interface of Confluent's: a message begins with the id of its schema.

    message    one byte 0, the id as four bytes, big-endian, then the payload

Schemas never change, so each is fetched once, by a thread. A message whose schema is not here yet waits, with all
behind it: `SchemaPendingError` tells the source so, and what the registry has answered. A registry that is away
therefore delays records, and loses none. A schema that the registry does not know is an error of the message.
"""

from __future__ import annotations

import base64
import json
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any

from millpy.clock import Clock, SystemClock
from millpy.config.access import NO_LOGIN, Login, Tls, files_of
from millpy.config.addresses import is_host_name
from millpy.config.secrets import secret
from millpy.errors import ConfigError
from millpy.model.arguments import check_instance

SCHEMAS_MAX = 1_000
"""The most schemas that are kept; and the most ids that the registry does not know."""
ANSWER_BYTES_MAX = 1_000_000
REFERENCES_MAX = 100
"""The most schemas that one schema refers to, directly or not."""
ANSWER_S_MAX = 10.0
SAID_BYTES_MAX = 1_000
LOGIN_REFUSALS = (401, 403)
REFUSALS = (*LOGIN_REFUSALS, 409, 422)
"""The answers of a registry that will be the same the next time."""
MEDIA_TYPE = "application/vnd.schemaregistry.v1+json"
UNKNOWN_S = 60.0
"""How long the registry is not asked again for an id that it did not know."""
PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_HEADER_BYTES = 5
CLOCK = SystemClock()
VARIABLE = "MILLPY_SCHEMA_REGISTRY_URL"


class SchemaPendingError(Exception):
    """A message cannot be read before the registry has answered.

    Attributes:
        done: is set when it has.
        why: what is wrong with the registry; empty while nothing is.
    """

    def __init__(self, done: Future[None], why: str) -> None:
        super().__init__(why or "waiting for the schema registry")
        self.done = done
        self.why = why


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema of the registry, and those that it refers to, each behind the ones that it needs."""

    id: int
    kind: str
    text: str
    references: tuple[str, ...] = ()


class IncompatibleSchemaError(Exception):
    """The registry refuses a schema."""


class RegistryLoginError(Exception):
    """The registry refuses our login, or does not allow it to do this."""


class _UnknownError(Exception):
    """The registry does not know what it was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaRegistry:
    """A schema registry: Confluent's, or one with its interface (Karapace, Apicurio, Redpanda).

    The address and credentials are no part of a graph's meaning, and may change at any time.

    Args:
        url: its address; by default that of the environment variable MILLPY_SCHEMA_REGISTRY_URL.
        login: our user name and password, or key and secret.
        tls: the files that verify it, for an address that begins with https.
    """

    url: str | None = None
    login: Login = NO_LOGIN
    tls: Tls | None = None

    def __post_init__(self) -> None:
        check_instance("login", self.login, Login, 'for example login=Login("me", "secret")')
        if self.tls is not None:
            check_instance("tls", self.tls, Tls, 'for example tls=Tls(ca="ca.pem")')
        if self.url is not None:
            _checked(self.url)

    def address(self) -> str:
        """Return the address. Raises ConfigError if none is given, or it is invalid."""
        found = self.url or secret(VARIABLE)
        if not found:
            raise ConfigError("no schema registry is named", hint=f"SchemaRegistry(url=…), or the variable {VARIABLE}")
        return _checked(found)


def _checked(url: object) -> str:
    """Return an address without a slash at its end. Raises ConfigError, which quotes no part: it may be a password."""
    try:
        parts = urllib.parse.urlsplit(str(url))
        is_url = parts.scheme in ("http", "https") and is_host_name(parts.hostname or "") and parts.port != 0
    except ValueError:
        is_url = False
    # An @ behind the host: a / ? or # in a password has split it.
    if not is_url or parts.query or parts.fragment or "@" in parts.path:
        raise ConfigError(
            "the address of the schema registry is invalid",
            hint='for example "http://registry:8081", with %40 %2F %3F %23 for @ / ? # in a password',
        )
    return str(url).rstrip("/")


class SchemaCache:
    """The schemas of one registry that a process has fetched.

    Args:
        registry: the registry.
        fetch: returns the JSON at a path; by default it asks the registry.
        clock: the source of time.
        pauses_s: the pauses before the next attempts; the last one is repeated.
    """

    def __init__(
        self,
        registry: SchemaRegistry,
        fetch: Callable[[str], Any] | None = None,
        clock: Clock = CLOCK,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._clock = clock
        self._pauses_s = pauses_s
        self._registry = registry
        self._fetch = fetch or self._get
        self._lock = threading.Lock()
        self._known: dict[int, RegisteredSchema] = {}
        self._unknown: dict[int, float] = {}
        self._pending: dict[int, Future[None]] = {}
        self._ids: dict[tuple[str, str], int] = {}
        self._why = ""

    def schema(self, schema_id: int) -> RegisteredSchema:
        """Return a schema.

        Raises:
            SchemaPendingError: it is not here yet; it is being fetched.
            ValueError: the registry does not know it.
        """
        with self._lock:
            if (known := self._known.get(schema_id)) is not None:
                return known
            asked = self._unknown.get(schema_id)
            if asked is not None and self._clock.monotonic() - asked < UNKNOWN_S:
                raise ValueError(f"the registry does not know schema {schema_id}")
            done = self._pending.get(schema_id)
            if done is None:
                done = self._pending[schema_id] = Future()
                threading.Thread(
                    target=self._run, args=(schema_id, done), name="millpy-schema-registry", daemon=True
                ).start()
            raise SchemaPendingError(done, self._why)

    def _run(self, schema_id: int, done: Future[None]) -> None:
        """Fetch a schema; try again until the registry answers."""
        attempt, pause = 0, threading.Event()
        while True:
            try:
                found: RegisteredSchema | None = self._found(schema_id)
            except _UnknownError:
                found = None
            except Exception as error:
                with self._lock:
                    self._why = f"the schema registry does not answer: {error}"
                pause.wait(self._pauses_s[min(attempt, len(self._pauses_s) - 1)])
                attempt += 1
                continue
            break
        with self._lock:
            self._why = ""
            if found is None:
                _keep(self._unknown, schema_id, self._clock.monotonic())
            else:
                self._unknown.pop(schema_id, None)
                _keep(self._known, schema_id, found)
            del self._pending[schema_id]
        done.set_result(None)

    def _found(self, schema_id: int) -> RegisteredSchema:
        answer = self._fetch(f"/schemas/ids/{schema_id}")
        references: dict[str, str] = {}
        self._add_references(answer, references, ())
        return RegisteredSchema(
            schema_id, str(answer.get("schemaType") or "AVRO"), _schema_in(answer), tuple(references.values())
        )

    def _add_references(self, answer: Any, found: dict[str, str], outer: tuple[str, ...]) -> None:
        """Add what a schema refers to, the innermost first. Raises _UnknownError for too many, and for circles."""
        for reference in answer.get("references") or ():
            subject, version = str(reference["subject"]), int(reference["version"])
            key = f"{subject}/{version}"
            if key in found:
                continue
            if key in outer or len(found) + len(outer) >= REFERENCES_MAX:
                raise _UnknownError(f"a schema refers to itself, or to more than {REFERENCES_MAX} others")
            inner = self._fetch(f"/subjects/{urllib.parse.quote(subject, safe='')}/versions/{version}")
            self._add_references(inner, found, (*outer, key))
            found[key] = _schema_in(inner)

    def id_of(self, subject: str, schema: str, *, register: bool) -> int:
        """Return the id of a schema under a subject, which is registered first if it is to be. It blocks.

        Raises:
            IncompatibleSchemaError: the registry refuses it, or does not know it and it is not to be registered.
            RegistryLoginError: the registry refuses our login.
            OSError: the registry cannot be reached, or something else answers in its place.
        """
        path = f"/subjects/{urllib.parse.quote(subject, safe='')}" + ("/versions" if register else "")
        try:
            answer = self._ask(path, {"schema": schema})
        except _UnknownError:
            raise IncompatibleSchemaError("it is not registered") from None
        found = answer.get("id")
        if not isinstance(found, int):
            raise OSError("it answers without the id of the schema")
        self.learn(subject, schema, found)
        return found

    def learn(self, subject: str, schema: str, schema_id: int) -> None:
        """Keep the id of a schema under a subject."""
        with self._lock:
            _keep(self._ids, (subject, schema), schema_id)

    def known_id(self, subject: str, schema: str) -> int | None:
        """Return the id of a schema under a subject if the registry was asked for it."""
        with self._lock:
            return self._ids.get((subject, schema))

    def _get(self, path: str) -> Any:
        return self._ask(path)

    def _ask(self, path: str, sent: Any = None) -> Any:
        registry = self._registry
        address = registry.address()
        parts = urllib.parse.urlsplit(address)
        of_url = [None if part is None else urllib.parse.unquote(part) for part in (parts.username, parts.password)]
        user, password = registry.login.username or of_url[0], registry.login.password or of_url[1]
        host = parts.netloc.rpartition("@")[2]
        request = urllib.request.Request(
            f"{parts.scheme}://{host}{parts.path}{path}",
            headers={"Accept": MEDIA_TYPE, "Content-Type": MEDIA_TYPE},
            data=None if sent is None else json.dumps(sent).encode(),
        )
        if user is not None:
            token = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {token}")
        files = files_of(registry.tls)
        context = None
        if parts.scheme == "https":
            context = ssl.create_default_context(cafile=None if files.ca is None else str(files.ca))
            if files.certificate is not None:
                context.load_cert_chain(files.certificate, files.key)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S_MAX, context=context) as answer:
                text = answer.read(ANSWER_BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            said = _said(error)
            if error.code == 404 and _is_of_registry(said):
                raise _UnknownError from None
            if sent is not None and said and error.code in REFUSALS:
                refusal = RegistryLoginError if error.code in LOGIN_REFUSALS else IncompatibleSchemaError
                raise refusal(f"{host} answers {error.code}: {said}") from None
            raise OSError(f"{host} answers {error.code} {error.reason}") from None
        except urllib.error.URLError as error:
            raise OSError(f"{host}: {error.reason}") from None
        except HTTPException as error:
            raise OSError(f"{host} does not speak HTTP: {error!r}") from None
        if len(text) > ANSWER_BYTES_MAX:
            raise _UnknownError(f"the schema has more than {ANSWER_BYTES_MAX} bytes")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise OSError(f"{host} answers something else than a schema registry does")
        return found


def _schema_in(answer: Any) -> str:
    """Return the schema of an answer. Raises OSError if it has none."""
    text = answer.get("schema")
    if not isinstance(text, str):
        raise OSError("it answers without a schema")
    return text


def _said(error: urllib.error.HTTPError) -> str:
    """Return the beginning of what an error says; "" if the connection breaks."""
    try:
        with error:
            return error.read(SAID_BYTES_MAX).decode(errors="replace")
    except (HTTPException, OSError):
        return ""


def _is_of_registry(said: str) -> bool:
    """Tell whether a 404 is a registry's own, such as 40403, rather than that of a proxy or of a wrong path."""
    try:
        found = json.loads(said)
    except ValueError:
        return False
    return isinstance(found, dict) and found.get("error_code") not in (None, 404)


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keep a value, and forget the oldest one beyond the bound."""
    kept.pop(key, None)
    if len(kept) >= SCHEMAS_MAX:
        del kept[next(iter(kept))]
    kept[key] = value


_CACHES: dict[SchemaRegistry, SchemaCache] = {}


def cache_of(registry: SchemaRegistry) -> SchemaCache:
    """Return the cache of a registry, one in a process."""
    return _CACHES.setdefault(registry, SchemaCache(registry))


def framed(schema_id: int, payload: bytes) -> bytes:
    """Return a message that begins with the id of its schema."""
    return b"\0" + schema_id.to_bytes(_HEADER_BYTES - 1, "big") + payload


def unframed(payload: bytes) -> tuple[int, bytes]:
    """Return the id of a message's schema, and the payload behind it.

    Raises:
        ValueError: the message does not begin with one.
    """
    if len(payload) < _HEADER_BYTES or payload[0]:
        raise ValueError("the message does not begin with the id of a schema: a byte 0, and four bytes")
    return int.from_bytes(payload[1:_HEADER_BYTES], "big"), payload[_HEADER_BYTES:]

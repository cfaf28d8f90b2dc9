"""HTTP as a source: a client posts records, and gets the answer when they are committed (injector.py).

No broker keeps the records: until the answer, they are the client's, which sends them again after an error, a timeout
or a lost connection. So `Dedupe` needs an id that stays the same: a field of the record, or the Idempotency-Key of the
request, which the source writes into a field.

Any worker accepts any request. The partition of a request follows from its key, or else from its bytes, so that all
attempts at one request meet the dedupe ids of one partition; a worker that does not own it passes the request on to the
owner (relay.py).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError
from millpy.formats import Format, Message
from millpy.formats.message import check_field, checked_format
from millpy.ingest.protocol import Source, SourceSetup, WorkerSetup
from millpy.ingest.request_traffic import RequestTraffic
from millpy.model.arguments import check_flags, check_instance, is_number, is_whole
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sources.http.address import ListenAddress, listen_address

if TYPE_CHECKING:
    from millpy.sources.http.injector import HttpInjector

PARTITIONS_MAX = 256
_PATH = re.compile(r"/[A-Za-z0-9._~/-]{0,199}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """The bounds of a source in one worker. A request beyond them gets status 413 or 429.

    Attributes:
        body_bytes: the most bytes of a body as it is sent, and at most four times MILLPY_RECORD_BYTES_MAX.
        waiting_bytes: the most bytes of all bodies that are being read or wait for their commit.
        waiting_requests: the most requests that wait for their commit.
        requests_per_s: the most requests a second from one client, as many at once, in each worker: from one token, or
            without tokens from one address. None for no bound.
        answer_s: how long a client waits for the commit, in seconds; then it gets status 503 and sends again.
    """

    body_bytes: int = 1_000_000
    waiting_bytes: int = 64_000_000
    waiting_requests: int = 1_000
    requests_per_s: float | None = None
    answer_s: float = 30.0

    def __post_init__(self) -> None:
        whole = {"body_bytes": self.body_bytes, "waiting_requests": self.waiting_requests}
        for name, value in whole.items():
            if not is_whole(value, 1):
                raise ConfigError(f"HttpBounds({name}={value!r}) must be a number from 1", hint="leave it out")
        if not is_whole(self.waiting_bytes, self.body_bytes):
            raise ConfigError(
                f"HttpBounds(waiting_bytes={self.waiting_bytes!r}) is below body_bytes={self.body_bytes!r}",
                hint="one request must fit",
            )
        for name, rate in {"requests_per_s": self.requests_per_s, "answer_s": self.answer_s}.items():
            if (rate is not None or name == "answer_s") and (not is_number(rate, 0) or rate == 0):
                raise ConfigError(f"HttpBounds({name}={rate!r}) must be a number above 0", hint="leave it out")


DEFAULT_BOUNDS = HttpBounds()


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Http(Source):
    """Records that clients post to a path; by default as JSON or lines of JSON.

    The repr and the identity leave out the address, the bounds, and what happens to bad records.

    Args:
        path: the path of the URL, such as "/readings".
        partitions: the number of source partitions, which several workers share.
        key_field: the str field that gets the Idempotency-Key of the request and the number of the record in it:
            `KEY#0`. Then each request needs the header. None fills no field.
        bad_records: "refuse" answers a request with a bad record with status 400 and takes none of its records;
            "dead_letter" takes the others, and names the bad ones in its answer.
        url: where each worker listens: `http://127.0.0.1:8081`, or `https://0.0.0.0:8443?certificate=FILE&key=FILE`. By
            default the environment variable MILLPY_INGEST_URL, else http://127.0.0.1:8081.
        anonymous: whether clients of other machines need no token. By default a worker listens only on this machine
            unless MILLPY_INGEST_TOKENS, or certificates of clients, say who may send.
        bounds: the bounds on bytes, requests and times.
        format: the payload format of a body, such as `Json(many="readings")`; by default one by its Content-Type.
        decode: instead of a format, a function from a `Message` to its records.
    """

    path: str
    count: int
    key_field: str | None
    bad_records: Literal["refuse", "dead_letter"]
    url: str | None
    anonymous: bool
    bounds: HttpBounds
    format: Format | None

    def __init__(  # noqa: PLR0913 - what a user may say of a feed
        self,
        path: str,
        *,
        partitions: int = 1,
        key_field: str | None = None,
        bad_records: Literal["refuse", "dead_letter"] = "refuse",
        url: str | None = None,
        anonymous: bool = False,
        bounds: HttpBounds = DEFAULT_BOUNDS,
        format: Format | None = None,
        decode: Callable[[Message], Iterable[Any]] | None = None,
    ) -> None:
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise ConfigError(f"{path!r} is not the path of a URL", hint='an example: Http("/readings")')
        if not is_whole(partitions, 1, PARTITIONS_MAX):
            raise ConfigError(
                f"partitions={partitions!r} must be a number from 1 to {PARTITIONS_MAX}",
                hint="for example partitions=4",
            )
        check_instance("bounds", bounds, HttpBounds, "for example bounds=HttpBounds(requests_per_s=10)")
        if bad_records not in ("refuse", "dead_letter"):
            raise ConfigError(f"unknown value bad_records={bad_records!r}", hint='choose "refuse" or "dead_letter"')
        check_flags(anonymous=anonymous)
        if url is not None:
            check_instance("url", url, str, 'for example url="http://127.0.0.1:8081"')
            listen_address(url)
        values = {
            "path": path, "count": partitions, "key_field": key_field, "bad_records": bad_records, "url": url,
            "anonymous": anonymous, "bounds": bounds, "format": checked_format(format, decode),
        }  # fmt: skip
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def identity(self) -> Identity:
        """Describe the path, and what decides on the partition and the fields of a record."""
        found: dict[str, Any] = {"kind": "http", "path": self.path, "partitions": self.count}
        found |= {} if self.key_field is None else {"key_field": self.key_field}
        return found if self.format is None else {**found, "format": self.format.identity()}

    def payload_format(self) -> Format | None:
        """Return `format`."""
        return self.format

    def partitions(self) -> tuple[str, ...]:
        """Return the path, with a number if there are several partitions."""
        return (self.path,) if self.count == 1 else tuple(f"{self.path}/{number}" for number in range(self.count))

    def validate(self, record_type: RecordType) -> None:
        """Check the field of the key, and the format. Raises GraphError."""
        if self.key_field is not None:
            kind = check_field(record_type, self.key_field, "key_field=")
            if kind is not str:
                raise GraphError(f"key_field={self.key_field!r} must be a str", hint=f"declare {self.key_field}: str")
            if record_type.struct.__struct_config__.array_like:
                struct = record_type.struct.__name__
                raise GraphError(f"key_field= does not fit {struct}, which is written as an array")
        if self.format is not None:
            self.format.validate(record_type)

    def address(self) -> ListenAddress:
        """Return where a worker listens. Raises ConfigError."""
        return listen_address(self.url)

    def connect(self, setup: SourceSetup) -> HttpInjector:
        """Return the injector of one partition, which does not accept requests yet.

        Raises:
            ConfigError: the package aiohttp is missing.
        """
        try:
            from millpy.sources.http.injector import HttpInjector
            from millpy.sources.http.listener import acquire  # needs an optional dependency
        except ImportError as error:
            raise ConfigError("HTTP needs the package aiohttp", hint=to_install("http")) from error
        worker = WorkerSetup(
            graph=setup.graph,
            stream=setup.stream,
            partitions=self.partitions(),
            limits=setup.limits,
            clock=setup.clock,
            secret=setup.secret,
            deduplicated=setup.deduplicated,
        )
        return HttpInjector(setup, self, lambda: acquire(self, worker))

    def serve(self, setup: WorkerSetup) -> AbstractAsyncContextManager[RequestTraffic]:
        """Return what accepts requests in a worker, also for partitions of others, and counts them.

        Raises:
            ConfigError: the package aiohttp is missing.
        """
        try:
            from millpy.sources.http.listener import serving  # needs an optional dependency
        except ImportError as error:
            raise ConfigError("HTTP needs the package aiohttp", hint=to_install("http")) from error
        return serving(self, setup)

    def examine(self, graph: str, stream: str) -> AsyncIterator[Finding]:
        """Check who may send, and whether a worker answers. Raises MillError."""
        from millpy.sources.http.examination import examine

        return examine(self, graph, stream)

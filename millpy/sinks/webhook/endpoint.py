"""Webhook: messages of a graph as HTTP requests to an endpoint.

An endpoint does not know our positions, so what was in flight when a worker died comes again: under the same
`webhook-id`, by which a receiver drops it. Messages of a key are posted one after another, those of different keys at
once.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from millpy.config.access import NO_FILES, Tls
from millpy.config.extras import to_install
from millpy.errors import ConfigError, GraphError
from millpy.model.arguments import check_instance, check_texts, is_number, is_whole
from millpy.model.finding import Finding
from millpy.model.identity import Identity
from millpy.model.record import RecordType
from millpy.sinks.messages import check_value
from millpy.sinks.protocol import SendBound, Sink, SinkConnection, SinkSetup
from millpy.sinks.refusal_policy import RefusalPolicy
from millpy.sinks.webhook.address import Origin, allowed_origins, origin_of

Batch = Literal["json", "ndjson"]
BATCH_TYPES: Mapping[str, str] = {"json": "application/json", "ndjson": "application/x-ndjson"}
SEND_MAX = SendBound(records=100, bytes=1_000_000)
IN_FLIGHT_MAX = 100
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]{0,3998}[\x21-\x7e])?")
OURS = frozenset({
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "cookie", "expect", "host",
    "idempotency-key", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
"""Headers that are ours to set, or that say how a request is transferred; as are those that begin with `webhook-`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookAccess:
    """By what a receiver knows us, and by what we know the receiver. It holds names of variables, never secrets.

    A variable X may be replaced by X_FILE, which names a file with the value. Secrets are read again every ten seconds.

    Attributes:
        signing: the variable with the secret of signatures after the Standard Webhooks specification, or with several
            while they are being replaced; by default requests are not signed.
        headers: the header -> the variable with its value, such as `{"Authorization": "ALERTS_AUTHORIZATION"}`.
        tls: the authorities to trust instead of the system's, and our certificate for receivers that require one.
    """

    signing: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: Tls = NO_FILES

    def __post_init__(self) -> None:
        check_instance("headers", self.headers, Mapping, 'for example {"Authorization": "ALERTS_AUTHORIZATION"}')
        check_texts("name the variable with the secret", signing=self.signing)
        check_instance("tls", self.tls, Tls, 'for example tls=Tls(ca="ca.pem"); https:// alone verifies, too')


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookTimeouts:
    """How long a request may take; then it is repeated.

    Attributes:
        connect_s: seconds for a connection, with the look-up of the name and TLS.
        answer_s: seconds for all of it, from the look-up to the last byte of the answer.
    """

    connect_s: float = 5.0
    answer_s: float = 30.0

    def __post_init__(self) -> None:
        if not (is_number(self.answer_s, 0, 600) and is_number(self.connect_s, 0, self.answer_s) and self.connect_s):
            raise ConfigError(
                f"{self!r} is no pair of timeouts", hint="use 0 < connect_s <= answer_s <= 600 (10 minutes)"
            )


NO_ACCESS = WebhookAccess()
DEFAULT_TIMEOUTS = WebhookTimeouts()


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Webhook(Sink):
    """An HTTP endpoint to which messages are posted: each at least once, under an id that never changes.

    The identity is the same for all endpoints: URL, secrets and bounds may change at any time.

    Args:
        url: the URL of the endpoint; None if a field has it.
        url_field: the text field with the URL of each message's endpoint. Needs `hosts`.
        hosts: the hosts that a URL from a field may have, such as "hooks.example.org" or "hooks.example.org:8443".
        value: the field whose text or bytes is the body; by default the whole record, as JSON. Needs `content_type`.
        content_type: the type of the body; by default application/json, and application/x-ndjson for lines.
        headers: the header -> the field with its value: text, or JSON; those with None are left out. What is not
            visible ASCII is percent-encoded.
        fixed_headers: the header -> its value.
        batch: "json" or "ndjson": a request has the messages of one `send`, as an array or as lines; by default a
            request has one message.
        bound: the most messages of one `send`: in a batch, and of what a crash may repeat in each interval.
        in_flight: the most requests at once from an interval, each of another key; with `batch` it is one.
        access: signatures, secret headers and certificates.
        timeouts: how long a request may take.
        message_bytes_max: the most bytes of a message; a record with a larger one becomes a dead letter.
        refusals: when to stop trying a message that the endpoint refuses; by default only one whose content it refuses
            (status 400, 413, 422 or 431) becomes a dead letter. With `batch`, other refusals are not counted.
    """

    url: str | None
    url_field: str | None
    hosts: frozenset[Origin]
    value: str
    content_type: str
    headers: tuple[str, ...]
    header_fields: tuple[tuple[str, str], ...]
    fixed_headers: tuple[tuple[str, str], ...]
    batch: Batch | None
    bound: SendBound
    in_flight: int
    access: WebhookAccess
    timeouts: WebhookTimeouts
    message_bytes_max: int
    refusals: RefusalPolicy
    stable_sends: bool

    def __init__(  # noqa: PLR0913 - what a user may say of an endpoint
        self,
        url: str | None = None,
        *,
        url_field: str | None = None,
        hosts: Sequence[str] = (),
        value: str = "",
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
        fixed_headers: Mapping[str, str] | None = None,
        batch: Batch | None = None,
        bound: SendBound = SEND_MAX,
        in_flight: int = 4,
        access: WebhookAccess = NO_ACCESS,
        timeouts: WebhookTimeouts = DEFAULT_TIMEOUTS,
        message_bytes_max: int = 1_000_000,
        refusals: RefusalPolicy = RefusalPolicy(),  # noqa: B008 - immutable
    ) -> None:
        for named in (headers, fixed_headers):
            check_instance("headers", named or {}, Mapping, 'for example headers={"X-Device": "device"}')
        check_instance("access", access, WebhookAccess, 'for example access=WebhookAccess(signing="ALERTS_SECRET")')
        check_instance("timeouts", timeouts, WebhookTimeouts, "for example WebhookTimeouts(answer_s=10)")
        check_instance("bound", bound, SendBound, "for example bound=SendBound(records=10)")
        check_instance("refusals", refusals, RefusalPolicy, "for example refusals=RefusalPolicy(attempts=3)")
        check_value(value, ())
        check_texts('for example url_field="callback_url"', url_field=url_field)
        of_fields, fixed = dict(headers or {}), dict(fixed_headers or {})
        _check_headers([*of_fields, *fixed, *access.headers], fixed)
        _check_body(batch, value, content_type, alone=bool(of_fields or url_field))
        _check_bounds(in_flight, message_bytes_max)
        fields = dict.fromkeys([*of_fields.values(), *([url_field] if url_field else ())])
        values = {
            "url": url, "url_field": url_field, "hosts": _checked_hosts(url, url_field, hosts, access), "value": value,
            "content_type": content_type or BATCH_TYPES.get(batch or "json", ""), "headers": tuple(fields),
            "header_fields": tuple(of_fields.items()), "fixed_headers": tuple(fixed.items()), "batch": batch,
            "bound": bound, "in_flight": 1 if batch else in_flight, "access": access, "timeouts": timeouts,
            "message_bytes_max": message_bytes_max, "refusals": refusals,
            "stable_sends": batch is not None,  # their messages share a request and its id
        }  # fmt: skip
        for name, given in values.items():
            object.__setattr__(self, name, given)

    def identity(self) -> Identity:
        """Describe the kind alone: positions do not depend on the endpoint."""
        return {"kind": "webhook"}

    def validate(self, record_type: RecordType) -> None:
        """Check that the field of the URL is text. Raises GraphError."""
        if self.url_field and record_type.field_type(self.url_field) is not str:
            raise GraphError(
                f"url_field={self.url_field!r} must be a str",
                hint=f"declare {self.url_field}: str",
            )

    def connect(self, setup: SinkSetup) -> SinkConnection:
        """Return a connection for an interval.

        Raises:
            ConfigError: the package aiohttp is missing, or a secret or a certificate is missing or unusable.
        """
        try:
            from millpy.sinks.webhook.connection import WebhookConnection  # needs an optional dependency
        except ImportError as error:
            raise ConfigError("a webhook needs the package aiohttp", hint=to_install("http")) from error
        return WebhookConnection(self, setup)

    def examine(self, graph: str, sink: str) -> AsyncIterator[Finding]:
        """Check names, TLS, certificates and secrets, without a request. Raises MillError."""
        del graph
        from millpy.sinks.webhook.examination import examine

        return examine(self, sink)


def _check_headers(names: Sequence[str], fixed: Mapping[str, str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a header", hint='for example headers={"X-Device": "device"}')
        low = name.lower()
        if low in OURS or low.startswith(("webhook-", "proxy-")):
            raise ConfigError(f"the header {name} is not yours to set", hint="millpy or the client sets it")
        if low in seen:
            raise ConfigError(f"the header {name} is named twice", hint="give it one value")
        seen.add(low)
    for name, value in fixed.items():
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise ConfigError(
                f"the value of the header {name} is not one line of ASCII",
                hint="percent-encode other characters; a secret belongs in WebhookAccess(headers=…)",
            )


def _check_body(batch: Batch | None, value: str, content_type: str | None, *, alone: bool) -> None:
    if batch is not None and batch not in get_args(Batch):
        raise ConfigError(f"unknown batch={batch!r}", hint='choose "json" or "ndjson", or None')
    if batch is not None and (value or alone):
        raise ConfigError(
            "a batch has whole records, and headers and a URL for all of them",
            hint="leave out batch=, or value=, headers= and url_field=",
        )
    if value and not content_type:
        raise ConfigError(f"value={value!r} needs content_type=", hint='for example content_type="text/plain"')
    if content_type is not None and not (isinstance(content_type, str) and _VALUE.fullmatch(content_type)):
        raise ConfigError(f"content_type={content_type!r} is no content type", hint='for example "application/json"')


def _check_bounds(in_flight: int, message_bytes_max: int) -> None:
    if not is_whole(in_flight, 1, IN_FLIGHT_MAX):
        raise ConfigError(f"in_flight={in_flight!r} is no number from 1 to {IN_FLIGHT_MAX}", hint="leave it out for 4")
    if not is_whole(message_bytes_max, 1):
        raise ConfigError(f"message_bytes_max={message_bytes_max!r} lets no message pass", hint="use a positive number")


def _checked_hosts(
    url: str | None, url_field: str | None, hosts: Sequence[str], access: WebhookAccess
) -> frozenset[Origin]:
    """Return the origins that may be reached, one for a fixed URL. Raises ConfigError."""
    if (url is None) == (url_field is None):
        raise ConfigError(
            "a webhook has either a URL or a field with it", hint='for example Webhook("https://example.org/alerts")'
        )
    if url_field is None and hosts:
        raise ConfigError("hosts= is for URLs from a field", hint="leave it out, or name url_field=")
    found = allowed_origins(hosts) if url_field is not None else frozenset({origin_of(url)})
    if access.headers and (open_ := sorted(str(origin) for origin in found if origin.exposes_secrets)):
        raise ConfigError(
            f"secret headers would reach {open_[0]} unencrypted",
            hint="use https://, or only sign",
        )
    return found

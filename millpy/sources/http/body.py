"""The body of a request becomes the payloads of records.

    application/json       an object is one record, an array is one record for each element
    application/x-ndjson   each line is a record; blank lines are skipped
    others                 MessagePack, CBOR and CSV by their Content-Type, if the source has no format of its own

A source with a format reads each body as one message of it, and of a body of lines each line. `Content-Encoding: gzip`
is read before that, up to a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from millpy.formats import Cbor, Csv, Format, Message, MessagePack
from millpy.formats.byte_order_marks import without_mark
from millpy.formats.gzipped import expanded
from millpy.formats.message import encoded_names
from millpy.ingest.expansion import Expander, Expansion
from millpy.ingest.json_append import completed
from millpy.ingest.protocol import RejectedRow, SourceSetup
from millpy.model.record import RecordType
from millpy.sources.http.answers import RETRY_S, RefusedRequestError

KEY_CHARACTERS_MAX: Final = 255
JSON_TYPES = frozenset({"application/json", "text/json"})
LINE_TYPES = frozenset({"application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines"})
_FORMATS: dict[str, Format] = {
    "application/msgpack": MessagePack(),
    "application/vnd.msgpack": MessagePack(),
    "application/x-msgpack": MessagePack(),
    "application/cbor": Cbor(),
    "text/csv": Csv(),
}
_GZIP = b"\x1f\x8b"
_SPACE = b" \t\r\n"
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_UTF8 = ("", "utf-8", "utf8", "us-ascii")


@dataclass(frozen=True, slots=True)
class PostedBody:
    """A request as it was sent.

    Attributes:
        content: its bytes.
        content_type: its media type in lower case, without parameters; empty if it has no type.
        charset: the parameter of that name, or empty.
        encoding: its Content-Encoding in lower case, or empty.
        key: its Idempotency-Key, without quotes; None for none.
        arrived_at: when its last byte arrived, in µs since the epoch.
    """

    content: bytes
    content_type: str = ""
    charset: str = ""
    encoding: str = ""
    key: str | None = None
    arrived_at: int = 0


@dataclass(slots=True)
class PostedRecords:
    """The records of a request.

    Attributes:
        payloads: one JSON object each, or the bytes of a part that is not an object.
        refused: the rows that are not records.
        messages: the row of a bad part -> the message that a replay reads.
        bytes: the bytes of all payloads.
    """

    payloads: list[bytes]
    refused: list[RejectedRow] = field(default_factory=list)
    messages: dict[int, Message] = field(default_factory=dict)
    bytes: int = 0


def media_type(header: str | None) -> tuple[str, str]:
    """Return the media type of a Content-Type header in lower case, and its charset, or empty texts."""
    kind, *parameters = (header or "").lower().split(";")
    given = dict(part.strip().partition("=")[::2] for part in parameters)
    return kind.strip(), given.get("charset", "").strip('" ')


def idempotency_key(header: str | None) -> str | None:
    """Return the value of an Idempotency-Key header, which may be in quotes; None for none.

    Raises:
        RefusedRequestError: it is empty, too long or not printable ASCII.
    """
    if header is None:
        return None
    key = header.strip()
    if len(key) > 1 and key[0] == key[-1] == '"':
        key = key[1:-1]
    if not 0 < len(key) <= KEY_CHARACTERS_MAX or not key.isascii() or not key.isprintable():
        raise RefusedRequestError(400, f"Idempotency-Key needs 1 to {KEY_CHARACTERS_MAX} printable ASCII characters")
    return key


class BodyReader:
    """Reads the bodies of one source.

    Args:
        form: the source's format; None for one by Content-Type.
        record_type: the type of the records.
        setup: the setup of the source.
        key_field: the field that gets the key of the request and the record's number; None for none.
        replays: whether bad parts become dead letters, which a replay reads by the source's format.
    """

    def __init__(
        self, form: Format | None, record_type: RecordType, setup: SourceSetup, key_field: str | None, *, replays: bool
    ) -> None:
        self._form = form
        self._record_type = record_type
        self._setup = setup
        self._limits = setup.limits
        self._replays = replays
        self._arrays = not record_type.struct.__struct_config__.array_like
        names = encoded_names(record_type)
        self._begin = b"" if key_field is None else b"," + msgspec.json.encode(names[key_field]) + b":"
        self._expanders: dict[str, Expander] = {}
        if form is not None:
            self._expanders[""] = Expander(form, record_type, self._limits, setup)

    def read(self, body: PostedBody) -> PostedRecords:
        """Return the records of a request.

        Raises:
            RefusedRequestError: the body as a whole cannot be read.
        """
        if self._begin and body.key is None:
            raise RefusedRequestError(400, "this source needs the header Idempotency-Key")
        content = self._decompressed(body)
        if body.charset not in _UTF8:
            raise RefusedRequestError(415, f"charset {body.charset[:40]!r} is not read: send UTF-8")
        lines = body.content_type in LINE_TYPES
        if self._form is not None:
            found = self._expanded("", content, body, lines=lines and self._form.reads_lines)
        elif body.content_type in _FORMATS:
            found = self._expanded(body.content_type, content, body)
        elif lines or body.content_type in JSON_TYPES or body.content_type.endswith("+json"):
            found = self._plain(content, lines=lines)
        else:
            raise RefusedRequestError(415, _unreadable(body.content_type))
        if body.key is not None and self._begin:
            self._complete(found, body.key)
        found.bytes = sum(map(len, found.payloads))
        if found.bytes > self._limits.message_bytes_max:
            raise RefusedRequestError(413, f"the records have more than {self._limits.message_bytes_max} bytes")
        return found

    def _decompressed(self, body: PostedBody) -> bytes:
        if body.encoding in ("", "identity"):
            if body.content.startswith(_GZIP) and body.content_type not in _FORMATS and self._form is None:
                raise RefusedRequestError(415, "the body is compressed: send the header Content-Encoding: gzip")
            return body.content
        if body.encoding not in ("gzip", "x-gzip", "deflate"):
            why = f"Content-Encoding {body.encoding[:40]!r} is not read: send gzip or deflate"
            raise RefusedRequestError(415, why, headers={"Accept-Encoding": "gzip, deflate"})
        try:
            # deflate is zlib, which some clients send without its header (RFC 9110, section 8.4.1.2)
            return expanded(body.content, may_be_bare=body.encoding == "deflate")
        except ValueError as error:
            status = 413 if "more than" in str(error) else 400
            raise RefusedRequestError(status, f"the body cannot be decompressed: {error}") from None

    def _plain(self, content: bytes, *, lines: bool) -> PostedRecords:
        """Return the objects of a JSON text, or of lines."""
        try:
            content = without_mark(content)
        except ValueError as error:
            raise RefusedRequestError(415, f"the body is not read: {error}") from None
        if lines:
            self._check_lines(content)
            payloads = [line for line in content.split(b"\n") if line.strip(_SPACE)]
        elif self._arrays and content.lstrip(_SPACE)[:1] == b"[":
            try:
                content.decode()  # msgspec does not check the text that it skips
                items = _ITEMS.decode(content)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise RefusedRequestError(400, f"the body is not a JSON array: {error}") from None
            self._check_count(len(items))
            payloads = [bytes(item) for item in items]
        elif content.strip(_SPACE):
            payloads = [content]
        else:
            raise RefusedRequestError(400, "the body is empty; an empty array has no records")
        self._check_count(len(payloads))
        return PostedRecords(payloads)

    def _expanded(self, kind: str, content: bytes, body: PostedBody, *, lines: bool = False) -> PostedRecords:
        """Return the records of a body in a format."""
        expander = self._expanders.get(kind)
        if expander is None:
            form = _FORMATS[kind]
            expander = self._expanders[kind] = Expander(form, self._record_type, self._limits, self._setup)
        if lines:
            self._check_lines(content)
        parts: Sequence[bytes] = content.split(b"\n") if lines else (content,)
        messages = [Message(part, topic=self._setup.partition, arrived_at=body.arrived_at) for part in parts]
        found = expander.expand(
            messages,
            records_max=self._limits.message_records_max,
            bytes_max=self._limits.message_bytes_max,
            skip_blank=lines,
        )
        if found.taken < len(messages):
            self._explain_rest(found)
        replayed = self._replays and self._form is not None
        if found.refused and self._replays and not replayed:
            raise RefusedRequestError(400, "the body is not readable", records=found.refused)
        return PostedRecords(found.payloads, found.refused, found.messages if replayed else {})

    def _explain_rest(self, found: Expansion) -> None:
        """Refuse a body that is too large, or that waits for its schema."""
        if self._setup.connection.held:
            raise RefusedRequestError(503, "the schema registry does not answer", retry_after_s=RETRY_S)
        if len(found.payloads) >= self._limits.message_records_max or found.bytes:
            raise RefusedRequestError(413, "the request has too many records, or too many bytes of them: send fewer")
        raise RefusedRequestError(503, "the schema of the body is being read", retry_after_s=RETRY_S)

    def _check_lines(self, content: bytes) -> None:
        """Refuse a body of far too many lines before it is split; a few of them may be blank."""
        if content.count(b"\n") > 2 * self._limits.message_records_max:
            self._check_count(content.count(b"\n"))

    def _check_count(self, count: int) -> None:
        if count > self._limits.message_records_max:
            raise RefusedRequestError(413, f"a request may have {self._limits.message_records_max} records: send fewer")

    def _complete(self, found: PostedRecords, key: str) -> None:
        """Write the key of the request and the number of the record into each."""
        begin = self._begin + msgspec.json.encode(key)[:-1]
        endings = [begin + b'#%d"' % number for number in range(len(found.payloads))]
        found.payloads = [
            completed(payload, ending + b"}") for payload, ending in zip(found.payloads, endings, strict=True)
        ]
        found.messages = {
            row: msgspec.structs.replace(message, ending=endings[row] + b"}") for row, message in found.messages.items()
        }


def _unreadable(content_type: str) -> str:
    what = f"Content-Type {content_type[:60]!r}" if content_type else "a body without Content-Type"
    return f"{what} is not read: send application/json or application/x-ndjson"

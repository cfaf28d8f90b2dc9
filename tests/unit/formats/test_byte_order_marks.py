"""Byte order marks: that of UTF-8 is passed over in every text format; wide text is read as `encoding=` says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millpy import Csv, Json, LineProtocol, Scalar
from millpy.errors import GraphError
from millpy.formats import BadPart, Format, Message
from millpy.ingest.decode import Decoder
from millpy.ingest.protocol import SourceBatch
from millpy.model.record import RecordType
from millpy.model.time import Instant
from millpy.sources.mqtt.inbox import MessageQueue
from millpy.sources.mqtt.packets import Messages
from millpy.sources.mqtt.topics import TopicPattern


class Row(msgspec.Struct):
    x: int
    name: str = ""


TYPE = RecordType(Row)
UTF_8 = b"\xef\xbb\xbf"
TEXT = "x,name\r\n1,Füllstand\r\n2,水\r\nbad,é\r\n3,𐅑\r\n"
WIDE = [
    ("utf-16", TEXT.encode("utf-16")),
    ("utf-16", TEXT.encode("utf-16-le")),
    ("utf-16", b"\xfe\xff" + TEXT.encode("utf-16-be")),
    ("utf-16-le", b"\xff\xfe" + TEXT.encode("utf-16-le")),
    ("UTF-16BE", TEXT.encode("utf-16-be")),
    ("utf-32", b"\xff\xfe\0\0" + TEXT.encode("utf-32-le")),
    ("utf-32", b"\0\0\xfe\xff" + TEXT.encode("utf-32-be")),
    ("utf-16", UTF_8 + TEXT.encode()),
]


def read(format: Format, payload: bytes, record_type: RecordType = TYPE) -> tuple[list[Any], list[bytes]]:
    parts = list(format.reader(record_type)(Message(payload)))
    taken = [part for part in parts if isinstance(part, bytes)]
    decoded = Decoder(record_type).decode(SourceBatch("json", Instant(0), payloads=taken))
    return decoded.objects or [], [part.payload for part in parts if isinstance(part, BadPart)]


@pytest.mark.parametrize("copies", [1, 100])
def test_json_with_the_mark_of_utf_8_is_read(copies: int) -> None:
    payload = UTF_8 + '{"x":1,"name":"ü"}'.encode()

    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=[payload] * copies))

    assert decoded.refused == []
    assert (decoded.objects or TYPE.objects_of(decoded.batch)) == [Row(1, "ü")] * copies  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("format", "payload"),
    [
        (Json(), b'{"x":1}'),
        (Json(), b' [{"x":1}]'),
        (Json(path="a"), b'{"a":{"x":1}}'),
        (Scalar("x"), b"1"),
        (LineProtocol(time="x"), b"m y=1 1"),
        (Csv(), b"x\n1\n"),
        (Csv(encoding="cp1252"), b"x\n1\n"),
        (Csv(header=["x"]), b"1\n"),
    ],
)
def test_every_text_format_passes_over_the_mark_of_utf_8(format: Format, payload: bytes) -> None:
    assert read(format, UTF_8 + payload) == ([Row(1)], [])
    with pytest.raises(ValueError, match="it is UTF-16, by its byte order mark: "):
        read(format, payload.decode().encode("utf-16"))


def test_other_marks_are_named_in_the_dead_letter() -> None:
    payloads = ['{"x":1}'.encode(encoding) for encoding in ("utf-16", "utf-32")]

    decoded = Decoder(TYPE).decode(SourceBatch("json", Instant(0), payloads=payloads))

    assert [refused.detail.partition("it is ")[2][:6] for refused in decoded.refused] == ["UTF-16", "UTF-32"]


@pytest.mark.parametrize("mark", [b"", UTF_8])
def test_an_array_of_readings_over_mqtt_may_have_the_mark(mark: bytes) -> None:
    queue = MessageQueue(
        topics=TopicPattern.parse("a").matches(), retained=True, arrays=True, readings_max=9, bytes_max=99
    )
    queue.put(Messages([b"a"], [mark + b'[{"x":1},{"x":2}]'], [1], [], []))

    assert queue.take(records_max=9, bytes_max=99, arrived_at=0).payloads() == [b'{"x":1}', b'{"x":2}']


@pytest.mark.parametrize(("encoding", "payload"), WIDE)
def test_wide_text_is_read_and_its_bad_rows_can_be_replayed(encoding: str, payload: bytes) -> None:
    format = Csv(encoding=encoding)
    rows = [Row(1, "Füllstand"), Row(2, "水"), Row(3, "𐅑")]

    objects, bad = read(format, payload)
    assert (objects, bad) == (rows, [])
    short = "x,name\n1,ü\n水\n"
    objects, bad = read(format, short.encode(encoding))
    assert (objects, bad) == ([Row(1, "ü")], [UTF_8 + "x,name\n水".encode()])
    assert read(format, bad[0].replace("水".encode(), "4,水".encode())) == ([Row(4, "水")], [])


def test_a_mark_that_is_not_of_the_encoding_names_the_setting() -> None:
    for encoding, wide in (("utf-8", "utf-16"), ("cp1252", "utf-32"), ("utf-16", "utf-32"), ("utf-32", "utf-16")):
        with pytest.raises(ValueError, match=f'set encoding="{wide}"'):
            read(Csv(encoding=encoding), TEXT.encode(wide))
    for encoding in ("cp037", "nothing"):
        with pytest.raises(GraphError, match="unknown"):
            Csv(encoding=encoding)

"""What devices and people really send: exports of spreadsheets, lost sensors, units that are not as declared."""

from __future__ import annotations

import gzip
import io
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import cbor2
import fastavro
import msgpack
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from millpy import (
    Avro,
    Cbor,
    Csv,
    Decode,
    EventTime,
    Format,
    Gzip,
    Json,
    LineProtocol,
    MessagePack,
    Scalar,
    days,
    minutes,
)
from millpy.errors import BrokenFileError, GraphError
from millpy.formats import Message
from millpy.ingest.dead_letters import PayloadFormat
from millpy.ingest.decode import DecodeResult
from millpy.ingest.expansion import Expander
from millpy.ingest.intake import Intake, IntakeSettings
from millpy.ingest.protocol import SourceBatch
from millpy.ingest.rejections import time_problems
from millpy.limits import Limits
from millpy.model.checkpoint import DeadLetter
from millpy.model.record import RecordType
from millpy.model.stage import StoredInterval
from millpy.model.time import ClockReading, instant
from millpy.sources.files.csv_header import check_format_header

NOW = instant(datetime(2026, 11, 26, 12, tzinfo=UTC))
GERMAN = EventTime("at", zone="Europe/Berlin", format="%d.%m.%Y %H:%M", max_disorder=minutes(1))
ISO = EventTime("at", max_disorder=minutes(1))
HEAD = "at;device;value\n"
SEMICOLONS = Csv(delimiter=";", decimal=",", null=["", "---"])


class Reading(msgspec.Struct):
    at: datetime
    device: str = ""
    value: float | None = None
    count: int | None = None


class Numbered(msgspec.Struct):
    at: int


def step(
    format: Format, *payloads: str | bytes, event_time: EventTime = ISO, kind: type = Reading, copies: int = 1
) -> tuple[list[Any], list[DeadLetter]]:
    record_type = RecordType(kind)
    format.validate(record_type)
    texts = [text.encode() if isinstance(text, str) else text for text in payloads] * copies
    messages = [Message(text, arrived_at=NOW) for text in texts]
    found = Expander(format, record_type, Limits()).expand(messages, records_max=10**6, bytes_max=10**8)
    batch = SourceBatch("json", NOW, found.payloads, refused=found.refused, messages=found.messages)
    settings = IntakeSettings(stream="readings", record_type=record_type, event_time=event_time, format=format)
    result = Intake(settings, StoredInterval(1, 1), []).step(batch, clock=ClockReading.certain(NOW), quiet=False)
    return result.records.objects() if result.records else [], list(result.dead_letters)


def values(format: Format, text: str | bytes) -> list[Any]:
    found, letters = step(format, text, event_time=GERMAN)
    assert letters == []
    return [(record.device, record.value) for record in found]


def test_a_scalar_may_be_a_decimal() -> None:
    class Exact(msgspec.Struct):
        at: int
        value: Decimal

    format = Scalar("value", decimal=",", arrival="at")
    format.validate(RecordType(Exact))

    read = format.reader(RecordType(Exact))

    (part,) = read(Message(b"+0021,500000000000000000000001", arrived_at=7))
    assert isinstance(part, bytes)
    assert msgspec.json.decode(part, type=Exact) == Exact(7, Decimal("21.500000000000000000000001"))


@pytest.mark.parametrize("copies", [1, 100])
def test_a_number_that_is_none_spoils_only_its_own_record(copies: int) -> None:
    """Lost sensors send NaN, which JSON does not have; a message has the readings of many sensors."""
    at = "2026-11-26T11:59:00Z"
    rows = [{"at": at, "value": 1.5}, {"at": at, "value": float("nan")}, {"at": at, "ignored": float("-inf")}]
    schema = {
        "type": "record", "name": "R", "fields": [
            {"name": "at", "type": "string"}, {"name": "value", "type": ["null", "double"], "default": None},
            {"name": "ignored", "type": ["null", "double"], "default": None},
        ],
    }  # fmt: skip
    for format, payloads in (
        (MessagePack(), [msgpack.packb(rows)]),
        (Cbor(Json(many="r")), [cbor2.dumps({"r": rows})]),
        (Avro(schema), [_as_avro(schema, row) for row in rows]),
        (Decode(lambda message: rows), [b""]),
    ):
        found, letters = step(format, *payloads, copies=copies)

        assert [record.value for record in found] == [1.5, None] * copies
        assert len(letters) == copies
        assert "NaN and infinities of binary formats are written so" in letters[0].detail


def _as_avro(schema: Any, row: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, schema, row)
    return out.getvalue()


def test_a_quote_counts_only_at_the_beginning_of_a_cell() -> None:
    text = HEAD + '26.11.2026 12:00;5" pipe;1,5\n26.11.2026 12:00;6" pipe;2\n26.11.2026 12:01;"two\nlines ""x""";3\n'
    assert values(SEMICOLONS, text) == [('5" pipe', 1.5), ('6" pipe', 2.0), ('two\nlines "x"', 3.0)]


def test_a_quote_that_is_not_closed_spoils_only_its_own_line() -> None:
    text = HEAD + '26.11.2026 12:00;"open;1\n26.11.2026 12:01;b;2\n26.11.2026 12:01;c;3\n'
    found, letters = step(SEMICOLONS, text, event_time=GERMAN)
    assert [record.device for record in found] == ["b", "c"]
    assert [letter.payload for letter in letters] == [HEAD.encode() + b'26.11.2026 12:00;"open;1']


def test_splitting_quoted_records_costs_as_much_as_their_bytes() -> None:
    """Cells that could be cut in several ways, and a quote that nothing closes: a quadratic cost would take minutes."""
    text = HEAD + '"a""b";' * 100_000 + '"' + '""' * 100_000 + "\n26.11.2026 12:00;b;2\n"
    found, letters = step(SEMICOLONS, text, event_time=GERMAN)
    assert ([record.device for record in found], len(letters)) == (["b"], 1)


def test_what_begins_with_the_mark_of_utf_8_is_utf_8() -> None:
    format = Csv(delimiter=";", decimal=",", encoding="cp1252")
    text = HEAD + "26.11.2026 12:00;Behälter;1,5\n26.11.2026 12:01;→;x\n"
    found, (letter,) = step(format, b"\xef\xbb\xbf" + text.encode(), event_time=GERMAN)
    assert [record.device for record in found] == ["Behälter"]
    assert msgspec.json.decode(letter.payload)["device"] == "→"
    assert values(format, (HEAD + "26.11.2026 12:00;Behälter;1,5\n").encode("cp1252")) == [("Behälter", 1.5)]
    _, (short,) = step(format, b"\xef\xbb\xbf" + HEAD.encode() + "26.11.2026 12:01;→".encode(), event_time=GERMAN)
    assert short.payload == b"\xef\xbb\xbf" + HEAD.encode() + "26.11.2026 12:01;→".encode()


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"at;device;value\r26.11.2026 12:00;a;1\r", "lines end in a carriage return alone"),
        (b"sep=;\nat;device;value\n26.11.2026 12:00;a;1\n", "a note for Excel"),
        ("at;device;value\n26.11.2026 12:00;a;1\n".encode("utf-16"), "it is UTF-16"),
    ],
)
def test_a_header_that_hides_all_records_is_told(head: bytes, why: str) -> None:
    found, (letter,) = step(SEMICOLONS, head, event_time=GERMAN)
    assert found == []
    assert why in letter.detail
    with pytest.raises(BrokenFileError, match=why):
        check_format_header("x.csv", head.split(b"\n")[0], SEMICOLONS, RecordType(Reading))


def test_a_missing_column_names_the_setting_that_renames() -> None:
    with pytest.raises(BrokenFileError, match=r"no column 'at'.*rename="):
        check_format_header("x.csv", b"Zeit;device", SEMICOLONS, RecordType(Reading))


def test_space_around_a_cell_counts_only_in_text() -> None:
    format = Csv(delimiter=";", decimal=",", null=["", "---"])
    text = HEAD + " 26.11.2026 12:00 ; a ; 1,5\n26.11.2026 12:00;b; --- \n26.11.2026 12:00;c;  \n"
    assert values(format, text) == [(" a ", 1.5), ("b", None), ("c", None)]


def test_an_empty_cell_is_empty_text_where_a_text_must_be() -> None:
    class Noted(msgspec.Struct):
        at: datetime
        note: str
        place: str | None
        site: str = "north"

    text = "at;note;place;site\n26.11.2026 12:00;;;\n26.11.2026 12:00;---;a;b\n"
    found, (letter,) = step(SEMICOLONS, text, event_time=GERMAN, kind=Noted)
    assert [(record.note, record.place, record.site) for record in found] == [("", None, "north")]
    assert "got `null`" in letter.detail


def test_whole_numbers_may_be_written_with_a_fraction_of_zeros() -> None:
    text = "at;count\n" + "".join(f"26.11.2026 12:00;{cell}\n" for cell in ("12,000", "1e3", "0,5", "1e" + "9" * 30))
    found, letters = step(Csv(delimiter=";", decimal=","), text, event_time=GERMAN)
    assert [record.count for record in found] == [12, 1000]
    assert len(letters) == 2
    lines, _ = step(LineProtocol(time="at"), "m,count=7.0 value=1 1700000000000000000")
    assert [record.count for record in lines] == [7]
    _, (signed,) = step(LineProtocol(time="at"), "m count=-7u 1700000000000000000")
    assert "'-7u' is not a value" in signed.detail


def test_lax_does_not_read_a_point_where_decimals_have_a_comma() -> None:
    _, (letter,) = step(SEMICOLONS, HEAD + "26.11.2026 12:00;a;1.234\n", event_time=GERMAN)
    assert letter.payload == (HEAD + "26.11.2026 12:00;a;1.234").encode()
    assert "has a point" in letter.detail
    assert letter.detail.startswith("column ")


def test_columns_that_are_renamed_to_one_field_are_joined() -> None:
    format = Csv(delimiter=";", decimal=",", null=["", "---"], rename={"Uhr": "at", "Datum": "at", "Ort": "device"})
    rows = "26.11.2026 ; 12:00;a;1\n26.11.2026;;b;1\n26.11.2026;12:01;c;2\n"
    found, (letter,) = step(format, "Datum;Uhr;Ort;value\n" + rows, event_time=GERMAN)
    assert [(record.device, record.at.hour, record.value) for record in found] == [("a", 11, 1.0), ("c", 11, 2.0)]
    assert "got `null`" in letter.detail
    for head in ("Datum;Datum;Ort", "Ort;device;Uhr", "Uhr;at;Ort"):
        _, (twice,) = step(format, f"{head}\n1;2;3\n", event_time=GERMAN)
        assert "two columns are" in twice.detail
        with pytest.raises(BrokenFileError, match="two columns are"):
            check_format_header("x.csv", head.encode(), format, RecordType(Reading))


def test_an_avro_message_that_is_cut_off_is_told_in_the_same_words_each_time() -> None:
    fields = [{"name": "at", "type": "string"}, {"name": "value", "type": "double"}]
    schema = {"type": "record", "name": "R", "fields": fields}
    payload = _as_avro(schema, {"at": "2026-11-26T11:59:00Z", "value": 1.5})
    _, (letter,) = step(Avro(schema), payload[:-3])
    assert letter.detail == "ValueError: the message is cut off"


def test_a_compressed_message_may_have_several_members() -> None:
    row = b'{"at":"2026-11-26T11:59:00Z","value":1}'
    found, letters = step(Gzip(Json()), gzip.compress(row[:9]) + gzip.compress(row[9:]) + b"\0\0")
    assert (len(found), letters) == (1, [])
    _, (many,) = step(Gzip(Json()), gzip.compress(b" ") * 101)
    assert "more than 100 members" in many.detail
    _, (large,) = step(Gzip(Json()), gzip.compress(b" " * 3_000_000) * 2)
    assert "expands to more than 4000000 bytes" in large.detail


def test_one_envelope_of_a_list_that_has_no_records_leaves_the_others() -> None:
    row = '{"at":"2026-11-26T11:59:00Z"}'
    found, letters = step(Json(path="r"), f'[{{"r":{row}}},{{"x":1}},5,[{{"r":{row}}}],{{"r":{row}}}]')
    assert len(found) == 2
    listed = f'[[{{"r":{row}}}]]'.encode()  # replayed without the outer brackets, it would be an envelope
    assert [(letter.payload, letter.detail) for letter in letters] == [
        (b'{"x":1}', "there is nothing at r"), (b"5", "there is nothing at r"), (listed, "there is nothing at r"),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [{"many": 5}, {"path": ""}, {"fields": "x"}, {"envelope": {"device": 5}}])
def test_what_is_no_path_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match=next(iter(wrong))):
        Json(**wrong)


def test_a_scalar_may_have_texts_that_mean_no_value() -> None:
    format = Scalar("value", arrival="at", null=["nan", "unavailable"])
    found, letters = step(format, "21.5", "nan", " unavailable\n", "", "NaN")
    assert [record.value for record in found] == [21.5, None, None, None]
    assert len(letters) == 1
    with pytest.raises(GraphError, match="'at' cannot be None"):
        Scalar("at", null=["-"]).validate(RecordType(Numbered))
    with pytest.raises(GraphError, match="not a list of texts"):
        Scalar("value", null="nan")


@pytest.mark.parametrize("copies", [1, 100])
@pytest.mark.parametrize(
    ("payload", "kind", "unit", "why"),
    [
        (" ", Reading, None, "the payload is empty"),
        ('{"at":1700000000000}', Numbered, "s", 'in milliseconds it would be a time of this century: unit="ms"'),
        ('{"at":99999999999999999}', Numbered, "s", "99999999999999999 in seconds is outside the years 1 to 9999"),
        ('{"at":46352.5}', Reading, None, "a number needs a field of type int or float, and its unit"),
        ('{"at":"26.11.2026 12:00"}', Reading, None, '"26.11.2026 12:00"; EventTime(format=…)'),
        ('{"at":"2026-11-26T12:00:00"}', Reading, None, 'EventTime(zone="Europe/Berlin") names it'),
        ('{"at":"2026-11-26T12:00:00Z","value":"1.5"}', Reading, None, '"1.5"; lax= reads numbers'),
        ('{"at":"2026-11-26T12:00:00Z","value":"on"}', Reading, None, 'at `$.value`: "on"'),
        ('{"at":"2026-11-26T12:00:00Z","value":1e400}', Reading, None, "at `$.value`: 1e400"),
    ],
)
def test_a_dead_letter_shows_the_value_and_says_what_reads_it(
    payload: str, kind: type, unit: Any, why: str, copies: int
) -> None:
    event_time = EventTime("at", unit=unit, max_disorder=minutes(1), future_tolerance=days(1))
    found, letters = step(Json(), payload, event_time=event_time, kind=kind, copies=copies)
    assert (len(found), len(letters)) == (0, copies)
    assert why in letters[-1].detail


def test_a_time_that_python_cannot_hold_is_told_without_its_value() -> None:
    times = pa.array([2**62, None], pa.int64()).cast(pa.timestamp("us", "UTC"))
    decoded = DecodeResult(np.arange(2), lambda row: b"", batch=pa.record_batch({"at": times}))
    problem = time_problems(decoded, "at", None)
    assert [problem(0), problem(1)] == ["at is outside the years 1 to 9999", "at is missing"]


def test_a_comment_with_a_quote_swallows_no_line_of_the_line_protocol() -> None:
    lines = '# unit="C\nroom,device=a value=1 5\n  # "\nroom,device=b value=2,s="x\n# y" 6'
    found, letters = step(LineProtocol(precision="s", time="at"), lines)
    assert [record.device for record in found] == ["a", "b"]
    assert letters == []


def test_a_quote_in_a_tag_or_a_name_begins_no_text() -> None:
    # The rest of the message was taken for one line, up to the next quote.
    lines = 'pipe,device="a value=1 5\npipe,device=b\\="b value=2,n\\="n=1 6\npipe,device=c value=3,s="=\n\\"" 7'
    found, letters = step(LineProtocol(precision="s", time="at"), lines)

    assert letters == []
    assert [(record.device, record.value) for record in found] == [('"a', 1), ('b="b', 2), ("c", 3)]


def test_quotes_that_are_never_closed_cost_no_more_than_their_number() -> None:
    text = "device;at;value\n" + 'x";"\n' * 5_000 + "a;2026-11-26T11:59:00Z;1\n"
    found, letters = step(Csv(delimiter=";"), text)
    assert [record.device for record in found] == ["a"]
    assert len(letters) > 100


def test_a_long_header_of_a_message_is_refused() -> None:
    found, (letter,) = step(Csv(), "device,at," + "x" * 70_000 + "\na,2026-11-26T11:59:00Z,1\n")
    assert not found
    assert letter.detail.endswith("its header has more than 65,536 characters")


@pytest.mark.parametrize(
    ("format", "encode", "keep"),
    [
        (MessagePack(Json(path="a")), msgpack.packb, bytes),
        (Cbor(Json(path="a")), cbor2.dumps, bytes),
        (Gzip(MessagePack(Json(path="a"))), lambda value: gzip.compress(msgpack.packb(value)), gzip.compress),
    ],
    ids=["message_pack", "cbor", "gzip"],
)
def test_a_bad_part_of_a_binary_message_is_read_again_as_what_it_is(format: Any, encode: Any, keep: Any) -> None:
    expander = Expander(format, RecordType(Reading), Limits())
    found = expander.expand([Message(encode([{"a": {"device": "x"}}, {"b": 1}]))], records_max=9, bytes_max=10**6)
    (message,) = found.messages.values()
    stored = msgspec.json.encode(PayloadFormat.from_message(message))
    wire = msgspec.json.decode(stored, type=PayloadFormat)

    again = expander.expand([wire.message(message.payload)], records_max=9, bytes_max=10**6)
    corrected = expander.expand([wire.message(keep(b'{"a":{"device":"y"}}'))], records_max=9, bytes_max=10**6)

    for refused in (found.refused, again.refused):
        (bad,) = refused
        assert bad.detail.endswith("there is nothing at a")
    assert again.messages == {0: message}
    assert (corrected.payloads, corrected.refused) == ([b'{"device":"y"}'], [])

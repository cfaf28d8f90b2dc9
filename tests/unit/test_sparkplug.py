"""Sparkplug sessions: metrics get names by the births before them, and what is missing or wrong is in other streams.

The golden payloads are of another encoder, with the schema that Eclipse Tahu publishes.
"""

from __future__ import annotations

import random
import zlib
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from millpy import (
    Dedupe,
    EventTime,
    Graph,
    Mqtt,
    RejectedMetric,
    Sparkplug,
    SparkplugEvent,
    SparkplugMessage,
    SparkplugMetric,
    hours,
    minutes,
    seconds,
    sparkplug_rebirth,
)
from millpy.errors import GraphError
from millpy.formats import Message
from millpy.formats.sparkplug_schema import payload_class
from millpy.operators import sparkplug
from millpy.testing import GraphDriver
from tests.docs.blocks import ROOT, blocks_of

NBIRTH = bytes.fromhex(
    "0880d8c1a28c3412120a0562645365711880d8c1a28c342004580312210a144e6f646520436f6e74726f6c2f526562697274681880d8c1a28c"
    "34200b700012210a0f4f696c2f54656d706572617475726510071880d8c1a28c3420096500002642121a0a094f696c2f4c6576656c10081880"
    "d8c1a28c34200250f4ff031800"
)
NDATA = bytes.fromhex(
    "08e8dfc1a28c341210100718e8dfc1a28c3420096500002942121310081880abdf9d8c342002280150f3ffffff0f1801"
)
NDEATH = bytes.fromhex("120b0a05626453657120045803")
TYPES = bytes.fromhex(
    "08f4dbc1a28c3412110a0161100118f4dbc1a28c34200150fb0112190a0162100218f4dbc1a28c34200858ffffffffffffffffff0112150a01"
    "63100318f4dbc1a28c34200d5880d8c1a28c3412130a0164100418f4dbc1a28c34200c7a0368c3a912130a0165100518f4dbc1a28c34201182"
    "0102010212190a0166100618f4dbc1a28c342004588080808080808080c00112140a0167100918f4dbc1a28c34200350ffffffff0f122a0a03"
    "736574100a18f4dbc1a28c3420108a011708021201781201791803180c22090a0208050a0332017312280a0374706c100b18f4dbc1a28c3420"
    "13920115120a0a0372706d200350dc0b22054d6f746f72280012100a016e100c18f4dbc1a28c34200338011801"
)
MS = 1_790_000_000_000
EVENT_TIME = EventTime("at", max_disorder=minutes(1))
Payload = payload_class()


def graph_of(**options: Any) -> Graph:
    graph = Graph("plant")
    source = Mqtt("spBv1.0/#", format=Sparkplug())
    messages = graph.inject(
        "messages", source, schema=SparkplugMessage, event_time=EVENT_TIME, dedupe=Dedupe("id", within=hours(1))
    )
    found = messages.sparkplug(**options)
    found.metrics.to_table("metrics")
    found.events.to_table("events")
    found.rejected.to_table("rejected")
    return graph


def message(kind: str, payload: Any, device: str = "", node: str = "press") -> Message:
    text = payload if isinstance(payload, bytes) else payload.SerializeToString()
    return Message(text, "/".join(["spBv1.0", "hall", kind, node, *([device] if device else [])]))


def payload(seq: int | None, *metrics: dict[str, Any], ms: int = MS) -> Any:
    made = Payload(timestamp=ms) if seq is None else Payload(timestamp=ms, seq=seq)
    for metric in metrics:
        made.metrics.add(**metric)
    return made


def birth(seq: int, *metrics: dict[str, Any], bd_seq: int = 0, ms: int = MS) -> Any:
    return payload(seq, {"name": "bdSeq", "datatype": 4, "long_value": bd_seq}, *metrics, ms=ms)


RPM = {"name": "rpm", "alias": 7, "datatype": 3, "int_value": 10}
BY_ALIAS = {"alias": 7, "int_value": 11}


def driver(*messages: Message, **options: Any) -> GraphDriver:
    made = GraphDriver(graph_of(**options))
    made.feed("messages", list(messages))
    return made


def metrics(made: GraphDriver) -> list[tuple[str, str, float | None]]:
    return [(own.device, own.name, own.value) for own in made.records("sparkplug_metrics")]


def events(made: GraphDriver) -> list[str]:
    return [
        f"{own.kind} {own.device} {own.detail}".replace("  ", " ").strip() for own in made.records("sparkplug_events")
    ]


def rejected(made: GraphDriver) -> list[tuple[str, str]]:
    return [(own.name, own.reason) for own in made.records("sparkplug_rejected")]


def test_data_gets_names_and_types_from_the_birth_before_it() -> None:
    made = driver(message("NBIRTH", NBIRTH), message("NDATA", NDATA), message("NDEATH", NDEATH))

    at = datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC)
    assert made.dead_letters() == []
    assert rejected(made) == []
    assert metrics(made) == [
        ("", "Node Control/Rebirth", 0.0),
        ("", "Oil/Temperature", 41.5),
        ("", "Oil/Level", -12.0),
        ("", "Oil/Temperature", 42.25),
        ("", "Oil/Level", -13.0),
    ]
    stored = made.timed_records("sparkplug_metrics")
    assert stored[-1] == (
        datetime(2026, 9, 21, 11, 26, 40, tzinfo=UTC),
        SparkplugMetric(
            "hall", "press", "", "Oil/Level", datetime(2026, 9, 21, 11, 26, 40, tzinfo=UTC), -13.0, -13, None, "Int16",
            is_null=False, is_historical=True, is_birth=False,
        ),
    )  # fmt: skip
    assert stored[-2][0] == at.replace(second=21)
    assert events(made) == ["node_birth bdSeq 3", "node_death bdSeq 3"]


def test_the_page_shows_these_payloads() -> None:
    blocks = {
        block.options["title"]: block.body
        for block in blocks_of(ROOT / "docs/payloads.md")
        if block.options.get("title")
    }

    assert bytes.fromhex(blocks["spBv1.0/hall/NBIRTH/press"]) == NBIRTH
    assert bytes.fromhex(blocks["spBv1.0/hall/NDATA/press"]) == NDATA


def test_every_data_type_has_its_value() -> None:
    made = driver(message("NBIRTH", NBIRTH), message("DBIRTH", TYPES, "d"))

    found = {own.name: own for own in made.records("sparkplug_metrics") if own.device}
    assert {name: own.whole for name, own in found.items() if own.whole is not None} == {
        "a": -5, "c": MS, "f": -(2**62), "g": -1,
    }  # fmt: skip
    assert {name: own.text for name, own in found.items() if own.text is not None} == {
        "b": "18446744073709551615",
        "c": "2026-09-21T14:13:20Z",
        "d": "hé",
        "e": "AQI=",
        "set": '{"columns":["x","y"],"types":["Int32","String"],"rows":[[5,"s"]]}',
        "tpl": '{"template":"Motor","version":"","is_definition":false,'
        '"metrics":[{"name":"rpm","type":"Int32","value":1500}],"parameters":[]}',
    }
    assert found["n"].is_null
    assert found["n"].value is None
    assert rejected(made) == []


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        (22, b"\xff\x01", "[-1,1]"),
        (31, b"\x00\x00\x00\x00\x00\x00\xf8\x3f", "[1.5]"),
        (32, b"\x0a\x00\x00\x00\x80\x40", "[true,false,false,false,false,false,false,false,false,true]"),
        (33, b"ab\0\xc3\xa9\0", '["ab","é"]'),
        (34, MS.to_bytes(8, "little"), '["2026-09-21T14:13:20Z"]'),
    ],
)
def test_arrays_are_lists(datatype: int, data: bytes, text: str) -> None:
    made = driver(message("NBIRTH", birth(0, {"name": "a", "datatype": datatype, "bytes_value": data})))

    assert [own.text for own in made.records("sparkplug_metrics")] == [text]


def test_a_gap_is_told_and_metrics_still_go_by_the_last_birth() -> None:
    gap = [message("NDATA", payload(seq, BY_ALIAS, ms=MS + seq)) for seq in (1, 3, 6)]
    made = driver(message("NBIRTH", birth(0, RPM)), *gap)

    assert metrics(made) == [("", "rpm", 10.0), *[("", "rpm", 11.0)] * 3]
    assert events(made) == [
        "node_birth bdSeq 0",
        "gap seq 3 instead of 2",
        "rebirth_needed messages are lost: seq 3 instead of 2",
        "gap seq 6 instead of 4",
    ]


def test_sequence_numbers_begin_again_after_255() -> None:
    made = driver(message("NBIRTH", birth(254)), *[message("NDATA", payload(seq)) for seq in (255, 0, 1)])

    assert events(made) == ["node_birth bdSeq 0"]


def test_a_rebirth_is_needed_again_only_after_a_time() -> None:
    late = [message("NDATA", payload(seq, BY_ALIAS, ms=MS + 20_000 * seq)) for seq in range(4)]
    made = driver(*late, rebirth_every=seconds(30))

    assert [own.at for own in made.records("sparkplug_events")] == [
        datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC),
        datetime(2026, 9, 21, 14, 14, 0, tzinfo=UTC),
    ]
    assert rejected(made) == [("alias 7", "the edge node is not born")] * 4


def test_devices_are_born_and_die_within_the_session() -> None:
    press = {"name": "force", "alias": 9, "datatype": 10, "double_value": 1.5}
    made = driver(
        message("NBIRTH", birth(0, RPM)),
        message("DDATA", payload(1, {"alias": 9, "double_value": 2.0}), "saw"),
        message("DBIRTH", payload(2, press), "saw"),
        message("DDATA", payload(3, {"alias": 9, "double_value": 3.0}), "saw"),
        message("DDATA", payload(4, BY_ALIAS), "saw"),
        message("DDEATH", payload(5), "saw"),
        message("DDATA", payload(6, {"alias": 9, "double_value": 4.0}, ms=MS + 60_000), "saw"),
        message("NBIRTH", birth(0, RPM, bd_seq=1)),
        message("DDATA", payload(1, {"alias": 9, "double_value": 5.0}, ms=MS + 120_000), "saw"),
    )

    assert metrics(made) == [("", "rpm", 10.0), ("saw", "force", 1.5), ("saw", "force", 3.0), ("", "rpm", 10.0)]
    assert rejected(made) == [
        ("alias 9", "the device is not born"),
        ("alias 7", "no birth names it"),
        ("alias 9", "the device is dead"),
        ("alias 9", "the device is not born"),
    ]
    needed = "rebirth_needed"
    assert [own.split()[0] for own in events(made)] == [
        "node_birth", needed, "device_birth", "device_death", needed, "node_birth", needed
    ]  # fmt: skip


def test_the_death_of_an_earlier_session_does_not_end_this_one() -> None:
    made = driver(
        message("NBIRTH", birth(0, RPM, bd_seq=4)), message("NDEATH", NDEATH), message("NDATA", payload(1, BY_ALIAS))
    )

    assert metrics(made)[-1] == ("", "rpm", 11.0)
    assert events(made) == ["node_birth bdSeq 4"]


def test_a_death_is_when_it_arrives_though_the_broker_has_it_since_the_node_connected() -> None:
    # The payload of a will is made before the birth, which may be days before the death.
    arrived = MS * 1_000 + 3 * 86_400_000_000
    number = {"name": "bdSeq", "datatype": 4, "long_value": 0, "timestamp": MS - 1}
    will = message("NDEATH", payload(None, number, ms=MS - 1))
    made = driver(message("NBIRTH", birth(0, RPM)), msgspec.structs.replace(will, arrived_at=arrived))

    at = datetime.fromtimestamp(arrived / 1_000_000, UTC)
    found, death = made.timed_records("sparkplug_events")[-1]
    assert (found, death.kind, death.at) == (at, "node_death", at)
    assert made.timed_records("messages")[-1][0] == at


def test_aliases_of_an_earlier_birth_are_forgotten() -> None:
    other = {**RPM, "name": "torque", "alias": 8}
    made = driver(
        message("NBIRTH", birth(0, RPM)),
        message("NBIRTH", birth(0, other, ms=MS + 1)),
        message("NDATA", payload(1, BY_ALIAS)),
    )

    assert rejected(made) == [("alias 7", "no birth names it")]


@pytest.mark.parametrize(
    ("metric", "reason"),
    [
        ({"datatype": 5, "int_value": 300}, "300 is no UInt8"),
        ({"datatype": 2, "int_value": 70_000}, "70000 has more than 16 bits"),
        ({"datatype": 10, "double_value": float("nan")}, "nan cannot be stored"),
        ({"datatype": 12, "string_value": "a\0"}, "NUL in text"),
        ({"datatype": 12, "int_value": 5}, "its int_value is no String"),
        ({"datatype": 15, "string_value": "x"}, "badly formed hexadecimal UUID string"),
        ({"datatype": 3}, "it has no value, and does not say that it is null"),
        ({"datatype": 23, "bytes_value": b"abc"}, "3 bytes are no Int16Array"),
        ({"datatype": 32, "bytes_value": b"\xff\xff\xff\xff"}, "a BooleanArray has another length than it says"),
        ({"datatype": 22, "bytes_value": b"a" * 100_001}, "an array has more than 100000 values"),
        ({"datatype": 99, "int_value": 5}, "the birth names no data type of it"),
        ({"datatype": 3, "int_value": 5, "timestamp": 250_000_000_000_000}, "its time is in the future"),
    ],
)
def test_a_metric_without_a_valid_value_is_rejected_alone(metric: dict[str, Any], reason: str) -> None:
    made = driver(message("NBIRTH", birth(0, {"name": "bad", **metric}, RPM)))

    assert metrics(made) == [("", "rpm", 10.0)]
    assert rejected(made) == [("bad", reason)]


TABLE = {"num_of_columns": 1, "columns": ["a"], "types": [12]}


@pytest.mark.parametrize(
    ("metric", "what"),
    [
        ({"datatype": 12, "string_value": "qq"}, "its text"),
        ({"datatype": 15, "string_value": "qq"}, "its text"),
        ({"datatype": 16, "dataset_value": {**TABLE, "columns": ["qq"]}}, "the name of a column"),
        ({"datatype": 16, "dataset_value": {**TABLE, "rows": [{"elements": [{"string_value": "qq"}]}]}}, "its text"),
        ({"datatype": 19, "template_value": {"template_ref": "qq"}}, "the name of a Template"),
        ({"datatype": 19, "template_value": {"version": "qq"}}, "the version of a Template"),
        ({"datatype": 19, "template_value": {"metrics": [{"name": "qq"}]}}, "a name in a Template"),
        ({"datatype": 19, "template_value": {"parameters": [{"name": "qq"}]}}, "a name in a Template"),
    ],
)  # fmt: skip
def test_a_metric_whose_text_is_not_utf_8_is_rejected_alone(metric: dict[str, Any], what: str) -> None:
    text = birth(0, {"name": "bad", **metric}, RPM).SerializeToString()
    assert text.count(b"qq") == 1

    made = driver(message("NBIRTH", text.replace(b"qq", b"a\xff")))

    assert made.dead_letters() == []
    assert metrics(made) == [("", "rpm", 10.0)]
    assert rejected(made) == [("bad", f"not UTF-8: {what}")]


@pytest.mark.parametrize(
    ("topic", "text", "reason"),
    [
        ("other/hall/NDATA/press", NDATA, "is not under spBv1.0/"),
        ("spBv1.0/hall/NDATA", NDATA, "names no edge node"),
        ("spBv1.0/hall/NDATA/press/saw", NDATA, "names no edge node"),
        ("spBv1.0/hall/DDATA/press", NDATA, "names no edge node"),
        ("spBv1.0/hall/NDATA/press", b"\x0a", "not a Sparkplug payload"),
        ("spBv1.0/hall/NDATA/press", b"\x08" + b"\xff" * 8 + b"\x7f", "after the year 9999"),
        ("spBv1.0/hall/NDATA/press", b"\x12\0" * 10_001, "more than 10000 metrics"),
        ("spBv1.0/hall/NDATA/press", b"\x12\0" * 400_000, "more than 700000 bytes"),
        ("spBv1.0/hall/NDATA/press", payload(1, {"name": "n" * 1_001}).SerializeToString(), "more than 1000 bytes"),
        ("spBv1.0/hall/NDATA/press", payload(1, {"name": "\0"}).SerializeToString(), "contains NUL"),
        ("spBv1.0/hall/NDATA/press", b"\x12\x04\x0a\x02a\xff", "not UTF-8: the name of a metric"),
    ],
)
def test_a_message_that_is_none_is_a_dead_letter(topic: str, text: bytes, reason: str) -> None:
    made = driver(Message(text, topic))

    (letter,) = made.dead_letters()
    assert reason in letter.detail
    assert letter.reason == "undecodable"


def test_commands_and_the_state_of_hosts_give_nothing() -> None:
    made = driver(
        message("NCMD", NDATA), message("DCMD", NDATA, "saw"), Message(b'{"online":true}', "spBv1.0/STATE/scada")
    )

    assert made.dead_letters() == []
    assert events(made) == []


def test_a_rebirth_is_asked_for_by_a_command() -> None:
    topic, text = sparkplug_rebirth("hall", "press", datetime(2026, 9, 21, 14, 13, 20, tzinfo=UTC))

    assert topic == "spBv1.0/hall/NCMD/press"
    # Metric 1: name "Node Control/Rebirth", data type Boolean, true; as another encoder writes it.
    wanted = "0880d8c1a28c34121a0a144e6f646520436f6e74726f6c2f52656269727468200b7001"
    assert text.hex() == wanted


def test_a_compressed_payload_is_read() -> None:
    packed = Payload(uuid="SPBV1.0_COMPRESSED", body=zlib.compress(NBIRTH), seq=0)
    made = driver(message("NBIRTH", packed))

    assert len(metrics(made)) == 3


def test_a_message_that_is_delivered_again_counts_once() -> None:
    again = [message("NDATA", payload(1, BY_ALIAS))] * 2
    made = driver(message("NBIRTH", birth(0, RPM)), *again)

    assert metrics(made)[1:] == [("", "rpm", 11.0)]
    assert events(made) == ["node_birth bdSeq 0"]


def test_what_births_define_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparkplug, "DEFINITIONS_MAX", 2)
    monkeypatch.setattr(sparkplug, "DEVICES_MAX", 1)
    three = [{"name": name, "alias": alias, "datatype": 3, "int_value": 1} for alias, name in enumerate("abc")]
    made = driver(
        message("NBIRTH", birth(0, *three)),
        message("NBIRTH", birth(0, *three[:1])),
        message("DBIRTH", payload(1), "saw"),
        message("DBIRTH", payload(2), "drill"),
    )

    assert [letter.detail.splitlines()[-1][:80] for letter in made.dead_letters()] == [
        "ValueError: the births of the edge node define more than 2 metrics",
        "ValueError: the edge node has more than 1 devices",
    ]


def test_two_metrics_of_a_birth_cannot_share_an_alias() -> None:
    made = driver(message("NBIRTH", birth(0, RPM, {**RPM, "name": "torque"})))

    assert "two metrics of a birth have '#7'" in made.dead_letters()[0].detail


@pytest.mark.parametrize("seed", range(3))
def test_bundles_and_crashes_change_nothing(seed: int) -> None:
    draw = random.Random(seed)
    sent = []
    for step in range(60):
        node = draw.choice(["press", "mill"])
        kind = draw.choice(["NBIRTH", "NDATA", "NDATA", "NDEATH", "DBIRTH", "DDATA", "DDATA", "DDEATH"])
        own = {"NBIRTH": birth(0, RPM, bd_seq=draw.randint(3, 4)), "NDEATH": NDEATH, "DBIRTH": payload(step % 5, RPM)}
        made = own.get(kind, payload(step % 3, BY_ALIAS, ms=MS + draw.randint(0, 9)))
        sent.append(message(kind, made, "saw" if kind[0] == "D" else "", node))
    at_once, one_by_one = driver(*sent), GraphDriver(graph_of())
    with one_by_one.crashing():
        for own in sent:
            one_by_one.feed("messages", [own])

    for stream in ("metrics", "events", "rejected"):
        pieces = [
            sorted(map(msgspec.json.encode, made.records(f"sparkplug_{stream}"))) for made in (at_once, one_by_one)
        ]
        assert pieces[0] == pieces[1]
        assert pieces[0]


def test_other_streams_and_classes_are_refused() -> None:
    graph = Graph("g")
    with pytest.raises(GraphError, match="gives messages"):
        graph.inject("a", Mqtt("spBv1.0/#", format=Sparkplug()), schema=SparkplugEvent, event_time=EVENT_TIME)
    other = graph.inject("b", Mqtt("b/#"), schema=RejectedMetric, event_time=EVENT_TIME)
    with pytest.raises(GraphError, match="needs Sparkplug messages"):
        other.sparkplug()

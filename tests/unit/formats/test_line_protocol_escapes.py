r"""Backslashes of the line protocol, as InfluxDB's documentation and Telegraf's parser read them.

Outside of text a backslash escapes a comma, an equals sign or a space, and no backslash; in text a quote or
a backslash.
"""

from __future__ import annotations

import msgspec
import pytest

from millpy import LineProtocol
from millpy.formats import BadPart, Message
from millpy.model.record import RecordType


class Odd(msgspec.Struct, rename={"escaped": "a,b =c"}):
    time: int | None = None
    measurement: str = ""
    t: str | None = None
    s: str | None = None
    v: float | None = None
    escaped: str | float | None = None


FORMAT = LineProtocol(measurement="measurement")


def read(text: str) -> list[Odd | str]:
    parts = FORMAT.reader(RecordType(Odd))(Message(text.encode()))
    return [part.detail if isinstance(part, BadPart) else msgspec.json.decode(part, type=Odd) for part in parts]


CASES = [
    (r"a\ b\,c v=1", Odd(measurement="a b,c", v=1)),
    (r"a\=b v=1", Odd(measurement=r"a\=b", v=1)),
    (r"a\b v=1", Odd(measurement=r"a\b", v=1)),
    (r"a\\ b v=1", Odd(measurement=r"a\ b", v=1)),
    (r"a\\,t=x v=1", Odd(measurement=r"a\,t=x", v=1)),
    (r"m,t=a\ b\,c\=d v=1", Odd(measurement="m", t="a b,c=d", v=1)),
    (r"m,t=C:\dir\\x v=1", Odd(measurement="m", t=r"C:\dir\\x", v=1)),
    (r"m,t=two\\ words v=1", Odd(measurement="m", t=r"two\ words", v=1)),
    (r"m,t=two\\\ words v=1", Odd(measurement="m", t=r"two\\ words", v=1)),
    (r"m,t=a\\,b v=1", Odd(measurement="m", t=r"a\,b", v=1)),
    (r"m,t=a\\\=b v=1", Odd(measurement="m", t=r"a\\=b", v=1)),
    (r"m,t=a\"b v=1", Odd(measurement="m", t=r"a\"b", v=1)),
    (r"m,a\,b\ \=c=x v=1", Odd(measurement="m", escaped="x", v=1)),
    (r"m,a\b=x v=1", Odd(measurement="m", v=1)),
    (r"m,a\\b=x v=1", Odd(measurement="m", v=1)),
    (r"m a\,b\ \=c=2,v=1", Odd(measurement="m", escaped=2.0, v=1)),
    (r"m a\b=2,v=1", Odd(measurement="m", v=1)),
    (r"m a\\b=2,v=1", Odd(measurement="m", v=1)),
    (r'm s="a\"b",v=1', Odd(measurement="m", s='a"b', v=1)),
    (r'm s="a\\",v=1', Odd(measurement="m", s="a\\", v=1)),
    (r'm s="a\\\"b",v=1', Odd(measurement="m", s=r"a\"b", v=1)),
    (r'm s="a\\\\b",v=1', Odd(measurement="m", s=r"a\\b", v=1)),
    (r'm s="C:\dir\,\ \=",v=1', Odd(measurement="m", s=r"C:\dir\,\ \=", v=1)),
    ('m s="a\\\nb",v=1', Odd(measurement="m", s="a\\\nb", v=1)),
]


@pytest.mark.parametrize(("line", "record"), CASES)
def test_a_backslash_escapes_only_what_it_must(line: str, record: Odd) -> None:
    assert read(line) == [record]
    # The beginning and end of a line are found by other patterns where a message has quotes.
    assert read(f'm s="x\ny"\n{line}\nm s="z"') == [
        Odd(measurement="m", s="x\ny"), record, Odd(measurement="m", s="z")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("m,t=a\\ v=1", "follows the tags"),
        (r"m,t=a\,v=1", "follows the tags"),
        (r"m v\=1", "is not a field"),
        (r'm s="a\"', "is not a field"),
        ("m\\", "follows the tags"),
        ("m,t=a\\", "follows the tags"),
    ],
)
def test_a_line_whose_delimiter_is_escaped_is_a_dead_letter_alone(line: str, why: str) -> None:
    good, bad = read(f"m v=1\n{line}")

    assert good == Odd(measurement="m", v=1)
    assert isinstance(bad, str)
    assert why in bad

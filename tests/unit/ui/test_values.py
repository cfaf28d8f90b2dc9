"""How the page writes values: one form for each type, and foreign text that cannot act."""

from __future__ import annotations

import html
import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from millpy.admin.loaders import TimeText
from millpy.ui.rendering import TEMPLATES
from millpy.ui.values import NONE, number, rate, seconds, shown, size

KEPT = "\n\t"


def text_of(markup: Markup) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, NONE),
        (True, "yes"),
        (0, "0"),
        (1_234_567, "1\u202f234\u202f567"),
        (-1_000, "-1\u202f000"),
        (2**70, "1\u202f180\u202f591\u202f620\u202f717\u202f411\u202f303\u202f424"),
        (0.1 + 0.2, "0.3"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (Decimal("1E+3"), "1\u202f000"),
        (Decimal("0.10"), "0.10"),
        (Decimal("NaN"), "NaN"),
        (timedelta(minutes=3, seconds=20), "3 min 20 s"),
        (TimeText("2026-11-20 08:00:00+00"), "2026-11-20 08:00:00 UTC"),
        (TimeText("2026-11-20 08:00:00.120000+00"), "2026-11-20 08:00:00.12 UTC"),
        (TimeText("2026-11-20 08:00:00.120999+00"), "2026-11-20 08:00:00.12 UTC"),
        (TimeText("infinity"), "the end"),
        (TimeText("-infinity"), "the beginning"),
        (TimeText("20000-01-01 00:00:00+00"), "20000-01-01 00:00:00+00"),
        (datetime(2026, 11, 20, 8, tzinfo=UTC), "2026-11-20 08:00:00 UTC"),
        (b"\xc3\xa9", "é"),
        (b"\xff\x00", "\\xff00"),
        (b"\x1b[2J", "\\x1b[2J"),
        ({"a": [1, None, "é"]}, '{"a": [1, null, "é"]}'),
        ("<b>&", "<b>&"),
        ("a\u202eb\x1b", "a\\u202eb\\x1b"),
    ],
)
def test_each_type_has_one_form(value: object, expected: str) -> None:
    assert text_of(shown(value)) == expected


def test_a_time_has_its_exact_form_for_machines() -> None:
    assert 'datetime="2026-11-20T08:00:00.123456Z"' in shown(TimeText("2026-11-20 08:00:00.123456+00"))


def test_long_bytes_are_cut_and_say_so() -> None:
    assert text_of(shown(b"x" * 5_000)) == f"{'x' * 1_000} … (5,000 bytes)"


def test_text_that_is_cut_inside_a_character_is_still_text() -> None:
    assert text_of(shown(("x" + "ж" * 2_500).encode())) == f"x{'ж' * 499} … (5,001 bytes)"
    assert text_of(shown("xж".encode()[:2])) == "\\x78d0"


@pytest.mark.parametrize(("value", "more"), [("x" * 5_000, ""), ({"long": "x" * 5_000}, '{"long": "')])
def test_a_long_value_of_a_table_is_cut_and_says_so(value: object, more: str) -> None:
    text = text_of(shown(value))

    assert text.startswith(more + "xxx") and text.endswith("characters)") and len(text) < 2_100


@given(st.one_of(st.text(), st.binary(), st.dictionaries(st.text(), st.text()), st.lists(st.text())))
def test_foreign_text_neither_acts_nor_hides(value: Any) -> None:
    markup = shown(value)
    inner = markup.replace(' class="line"', "", 1).removeprefix("<bdi>").removesuffix("</bdi>")

    assert "<" not in inner and ">" not in inner and '"' not in inner
    assert all(character.isprintable() or character in KEPT for character in html.unescape(inner))


@given(st.text())
def test_no_expression_of_a_template_writes_markup_or_what_is_invisible(value: str) -> None:
    written = TEMPLATES.from_string('<p title="{{ value }}">{{ value }}</p>').render(value=value)
    attribute, _, inner = written.removeprefix('<p title="').removesuffix("</p>").partition('">')

    assert attribute == inner
    assert not set(attribute) & set("<>\"'")
    assert all(character.isprintable() or character in KEPT for character in html.unescape(attribute))


def test_a_name_that_a_template_does_not_have_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        TEMPLATES.from_string("{{ missing }}").render()


@pytest.mark.parametrize(
    ("count", "expected"),
    [(None, NONE), (0, "0 B"), (999, "999 B"), (1_500, "1.5 kB"), (2e8, "200 MB"), (3e15, "3000 TB")],
)
def test_sizes_have_units(count: float | None, expected: str) -> None:
    assert size(count) == expected


def test_rates_and_seconds_are_short() -> None:
    assert [rate(count) for count in (None, 0.0, 0.26, 99.96, 1234.5)] == [NONE, "0", "0.3", "100.0", "1\u202f234"]
    assert [seconds(count) for count in (None, 90)] == [NONE, "1 min 30 s"]
    assert number(5) == "5"

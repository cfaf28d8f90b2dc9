"""Durations on the command line: what people write is parsed, and what is printed can be written again."""

from __future__ import annotations

from datetime import timedelta

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from millpy.cli.options import duration_s
from millpy.config.durations import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45", 45), ("1.5", 1.5), ("90s", 90), ("30m", 1_800), ("30 min", 1_800), ("1.5h", 5_400), ("1h30m", 5_400),
        ("20 d 17 h", 1_789_200), ("2w", 1_209_600), ("500ms", 0.5), ("7µs", 7e-6), ("0", 0), (" 3 M ", 180),
    ],
)  # fmt: skip
def test_a_duration_is_a_number_of_units(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "text",
    ["", " ", "m", "30x", "-5m", "1h1h", "1m1h", "1h 5", "nan", "inf", "1e9", "5 m!", "٣m", "9999999999w", "1" * 5_000],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        parse_duration(text)


def test_an_option_names_the_text_that_is_no_duration() -> None:
    with pytest.raises(typer.BadParameter, match=r"'yesterday' is not a duration; for example 90s, 30m, 2h"):
        duration_s("yesterday")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (0.4567891, "0.456 s"), (9.99, "9.99 s"), (45, "45 s"), (45.67, "45.6 s"), (60, "1 min"),
        (200, "3 min 20 s"), (3_600, "1 h"), (3_659, "1 h"), (7_500, "2 h 5 min"), (1_789_840.9, "20 d 17 h"),
        (86_400 + 59, "1 d"), (-90, "-1 min 30 s"), (-0.0004, "0 s"),
    ],
)  # fmt: skip
def test_two_units_are_printed(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.timedeltas(timedelta(0), timedelta(days=100_000)))
def test_the_exact_form_is_parsed_to_the_same_duration(duration: timedelta) -> None:
    assert parse_duration(format_duration(duration, exact=True)) == duration

"""The explanation of a watermark on a terminal is whole."""

from __future__ import annotations

from millpy.cli.explanation import wrapped


def test_explanation_is_wrapped_and_nothing_is_cut() -> None:
    detail = "source partition a has delivered nothing later than 2026-11-20 08:00:00+00; " + "its newest record " * 20
    step = {
        "step": 1,
        "computation": "readings",
        "part": "source partition a\x1b[31m",
        "input_watermark": "-infinity",
        "low_watermark": "2026-11-20 08:00:00+00",
        "held_by": "source",
        "detail": detail,
        "held_for": None,
    }

    text = wrapped([step, step], 80)

    assert max(map(len, text.split("\n"))) <= 80
    assert "\x1b" not in text
    assert " ".join(detail.split()) in " ".join(text.split())
    assert "input watermark the beginning, low watermark 2026-11-20 08:00:00Z" in " ".join(text.split())

"""The picture of `millpy status`: what needs somebody comes first, rates between two looks, nothing wider or taller."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from millpy.cli.sections import Section, lay_out
from millpy.cli.status import status_sections
from millpy.cli.watch import Look
from millpy.model.time import Instant


def a_source(partition: str, **changed: Any) -> dict[str, Any]:
    row = {
        "graph": "plant", "stream": "readings", "source_partition": partition, "state": "running", "injected": 100,
        "duplicate": 0, "dead_lettered": 0, "disconnected_because": None, "connection_since": None,
        "paused_because": None, "paused_at": None,
    }  # fmt: skip
    return {**row, **changed}


def an_account(consumer: str, **changed: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(
        (
            "stream",
            "source_partition",
            "result_table",
            "injected",
            "accepted",
            "duplicate",
            "added",
            "filtered",
            "parked",
        )
    )
    row |= {"graph": "plant", "consumer": consumer, "produced": 9, "consumed": 9, "late": 0, "dead_lettered": 0}
    return {**row, "pending": 0, "balanced": True, **changed}


def a_watermark(computation: str, lag_s: float | None, low: str = "2026-11-20 08:00:00+00") -> dict[str, Any]:
    lag = None if lag_s is None else timedelta(seconds=lag_s)
    return {"graph": "plant", "computation": computation, "lag": lag, "low_watermark": low}


def a_look(at_s: float = 0.0, **answers: Any) -> Look:
    empty: dict[str, Any] = {"workers": [], "sources": [], "accounting": [], "silences": [], "watermarks": []}
    return Look(Instant(0), at_s, {**empty, **answers})


def section(title: str, now: Look, before: Look | None = None) -> Section:
    return next(found for found in status_sections(now, before) if found.title == title)


def test_rates_are_those_between_two_looks() -> None:
    before = a_look(10.0, sources=[a_source("0"), a_source("1")], accounting=[an_account("sums")])
    now = a_look(
        12.0,
        sources=[a_source("0", injected=150), a_source("1", injected=90), a_source("2")],
        accounting=[an_account("sums", consumed=10)],
        watermarks=[a_watermark("sums", 1)],
    )

    assert [row["per_s"] for row in section("sources", now, before).rows] == [25.0, None, None]
    assert [row["per_s"] for row in section("sources", now).rows] == [None, None, None]
    assert [row["per_s"] for row in section("steps", now, before).rows] == [0.5]


def test_workers_show_what_they_report_and_whether_they_drain() -> None:
    known = {
        "graph": "plant", "worker_id": "0123456789", "host": "h", "pid": 1, "intervals": 2, "computations": [],
        "drain_requested_at": None,
    }  # fmt: skip
    used = {"memory_bytes": 181_000_000, "turn_p99_s": 0.0123, "commit_p99_s": 0.0009}
    fresh = dict.fromkeys(used)
    lines = section(
        "workers",
        a_look(
            workers=[
                {**known, **used, "live": True},
                {**known, **fresh, "live": True, "drain_requested_at": "2026-11-20 08:00:00+00"},
                {**known, **used, "live": False, "drain_requested_at": "2026-11-20 08:00:00+00"},
            ]
        ),
    ).rows

    assert [(line["state"], line["memory"], line["turn_p99"], line["commit_p99"]) for line in lines] == [
        ("draining", None, None, None),
        ("lease ended", "181 MB", "12 ms", "0.9 ms"),
        ("live", "181 MB", "12 ms", "0.9 ms"),
    ]


def test_what_needs_somebody_comes_first_and_says_why() -> None:
    why = {"disconnected_because": "refused", "connection_since": "2026-11-20 08:00:00+00"}
    now = a_look(sources=[a_source("0"), a_source("1", state="disconnected", **why)])

    found = section("sources", now)

    assert [row["partition"] for row in found.rows] == ["1", "0"]
    assert found.notes == ["readings 1: disconnected since 2026-11-20 08:00:00Z: refused"]


def test_a_step_is_as_late_as_its_slowest_interval() -> None:
    rows = [a_watermark("sums", 3), a_watermark("sums", 90), a_watermark("done", None, "infinity")]
    rows += [a_watermark("new", None, "-infinity"), a_watermark("new", 5), a_watermark("readings", 1)]
    now = a_look(watermarks=rows, accounting=[an_account(name) for name in ("sums", "sums", "done", "new")])

    lines = section("steps", now).rows

    assert [(row["step"], row["lag"]) for row in lines] == [
        ("sums", "1 min 30 s"),
        ("done", "ended"),
        ("new", "no watermark"),
    ]
    assert lines[0]["records"] == 18, "of both subscriptions"


def test_accounts_that_differ_are_shown_whole() -> None:
    right, wrong = an_account("sums"), an_account("totals", consumed=8, balanced=False)

    assert section("accounts", a_look(accounting=[right])).notes == ["1 of 1 balanced"]
    found = section("accounts", a_look(accounting=[right, wrong]))
    assert [row["account"] for row in found.rows] == ["totals"]
    assert found.notes == ["1 of 2 are NOT balanced: run `millpy doctor`"]


def test_graph_is_named_where_there_are_several() -> None:
    one = a_look(sources=[a_source("0")])
    two = a_look(sources=[a_source("0"), a_source("0", graph="yard")])

    assert "graph" not in section("sources", one).rows[0]
    assert [row["graph"] for row in section("sources", two).rows] == ["plant", "yard"]


@pytest.mark.parametrize("height", [1, 5, 12, 24, 200])
@pytest.mark.parametrize("width", [40, 80, 300])
def test_picture_is_no_wider_and_no_taller_than_the_terminal(width: int, height: int) -> None:
    sources = [a_source(f"{n}", disconnected_because="the broker\x1b[31m of " + "words " * 40) for n in range(400)]
    now = a_look(sources=sources, accounting=[an_account("sums")], watermarks=[a_watermark("sums", 1)])

    lines = lay_out(["DATABASE AWAY " + "because " * 30], status_sections(now, None), width, height)

    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)


def test_rows_that_do_not_fit_are_counted_in_each_section() -> None:
    first, second = [{"n": n} for n in range(100)], [{"m": m} for m in range(4)]

    lines = lay_out(["head"], [Section("first", first), Section("second", second)], 80, 24)

    assert len(lines) <= 24
    assert lines[-1].strip() == "3", "the whole second section"
    begins = lines.index("first") + 3
    shown = lines.index("second") - 2 - begins
    assert lines[begins + shown] == f"({100 - shown} more)"

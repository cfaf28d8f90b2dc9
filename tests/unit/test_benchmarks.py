"""Benchmarks fail when a figure breaks a bound; what they measure is seen when they run."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness import Bench, Bound, arguments


def finish(*given: str, **figures: object) -> None:
    options = arguments("", "differences<=0").parse_args([part for text in given for part in ("--bound", text)])
    Bench("trial", options).finish(**figures)


def test_run_within_its_bounds_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    finish("client_ratio>=8", differences=0, client_ratio=8.0)

    assert json.loads(capsys.readouterr().out.splitlines()[-1])["client_ratio"] == 8.0


@pytest.mark.parametrize(
    ("figures", "output"),
    [
        ({"differences": 1, "client_ratio": 9.0}, "differences is 1, not differences<=0"),
        ({"differences": 0, "client_ratio": 7.99}, "client_ratio is 7.99, not client_ratio>=8"),
        ({"differences": 0, "client_ratio": float("nan")}, "client_ratio is nan"),
        ({"differences": 0}, "client_ratio is None"),
    ],
)
def test_broken_bound_fails_the_run_after_its_last_line(
    figures: dict[str, object], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        finish("client_ratio>=8", **figures)

    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert json.loads(printed.out.splitlines()[-1])["workload"] == "trial"
    assert output in printed.err


@pytest.mark.parametrize("text", ["differences", "<=3", "differences<=few"])
def test_unreadable_bound_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Bound.parse(text)

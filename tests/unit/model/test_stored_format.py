"""What is stored of a graph: the descriptions in stored_format.json are read by the next version of millpy.

A change here would refuse every deployed graph. If it is meant: raise `FORMAT` (model/deployment.py), unless the
descriptions that are stored stay equal, and write the file anew: `python -m tests.unit.model.test_stored_format`.
A release writes it, too; until then a new part may change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millpy import minutes
from millpy.errors import GraphError, GraphVersionError
from millpy.model.deployment import FORMAT, check_format
from millpy.model.graph_changes import changes_between
from millpy.model.identity_text import identity_text
from tests.unit.model.described_graph import described_graph
from tests.unit.model.test_described_parts import MEANINGS, described, first, made

STORED = Path(__file__).with_name("stored_format.json")


def current() -> dict[str, Any]:
    parts = {name: described(made(name, first(name))) for name in sorted(MEANINGS)}
    found: dict[str, Any] = json.loads(json.dumps({"graph": described_graph().spec().description(), "parts": parts}))
    return found


def test_stored_descriptions_are_still_produced() -> None:
    stored = json.loads(STORED.read_text())

    assert changes_between(stored["graph"], current()["graph"]) == []
    assert current()["graph"] == stored["graph"]
    assert current()["parts"].items() >= stored["parts"].items()


def test_every_identity_in_a_graph_prints_as_in_user_code() -> None:
    computations = current()["graph"]["computations"]
    parts = {name: dict(found["identity"].get("aggregates", ())) for name, found in computations.items()}
    cells = dict(computations["spikes"]["identity"]["cells"])

    assert identity_text(computations["sessions"]["identity"]["window"]) == (
        "SessionWindows(minutes(30), by_key={'fast': minutes(1), 'slow': hours(2)})"
    )
    assert identity_text(parts["sliding"]["most"]) == "Quantile('value', 0.99, accuracy=0.02)"
    assert identity_text(parts["sessions"]["range"]) == "Range(levels={'high', 'low'}, low=1.5) keeping list[float]"
    assert identity_text(computations["files"]["identity"]["source"]) == (
        "Files('a.csv', 'b/*.csv', format='csv', partitions=2)"
    )
    assert identity_text(cells["kind"]) == "Value(Literal['a', 'b'], default=\"a\")"
    assert identity_text(cells["last"]) == "ListCell(tuple[int, str(max_length=8)])"
    assert [identity_text(found) for found in current()["graph"]["subscriptions"][-1]["operators"]] == []


def test_description_of_a_newer_format_asks_for_a_newer_millpy() -> None:
    newer = {**current()["graph"], "format": FORMAT + 1}

    with pytest.raises(GraphVersionError, match=f"'described': its description has format {FORMAT + 1}") as refused:
        check_format("described", newer)

    assert "update millpy" in str(refused.value.hint)


@pytest.mark.parametrize("stored", [{}, {"format": 0}, {"format": "1"}])
def test_description_of_an_unknown_format_asks_for_a_new_generation(stored: dict[str, Any]) -> None:
    with pytest.raises(GraphError, match="cannot compare with deployed graph 'described'") as refused:
        check_format("described", stored)

    assert "next generation" in str(refused.value.hint)


def test_difference_of_long_descriptions_shows_where_they_differ() -> None:
    before, after = current()["graph"], current()["graph"]
    window = after["computations"]["sessions"]["identity"]["window"]
    window["by_key"]["dict"][1][1]["us"] = minutes(5) // minutes(1) * 60_000_000

    (change,) = changes_between(before, after)

    assert str(change) == (
        "sessions: the window changed from SessionWindows(minutes(30), by_key={'fast': minutes(1), 'slow': hours(2)}) "
        "to SessionWindows(minutes(30), by_key={'fast': minutes(1), 'slow': minutes(5)})"
    )


if __name__ == "__main__":
    STORED.write_text(json.dumps(current(), indent=1, sort_keys=True) + "\n")

"""Windows over several streams of one type: what is dead-lettered is counted for the stream on which it came."""

import msgspec
import numpy as np
import pytest

from millpy.limits import Limits
from millpy.model.bundle import Bundle
from millpy.model.keys import KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.stage import InputBundle, InputSpec, StageBinding, StoredInterval, Work
from millpy.model.time import INSTANT_MAX, Instant, milliseconds, seconds
from millpy.windowing.aggregates.numeric import Count, Max
from millpy.windowing.logic import WindowedLogic
from millpy.windowing.window import FixedWindows, SessionWindows, Windows


class Note(msgspec.Struct):
    key: str
    text: str


TYPE = RecordType(Note)
HASHER = KeyHasher()


def arrived(place: int, notes: list[tuple[str, int, int]]) -> InputBundle:
    """(text, event time, watermark) each."""
    records = Records(
        TYPE,
        np.array([at for _, at, _ in notes], np.int64),
        watermarks=np.array([mark for *_, mark in notes], np.int64),
        objects=[Note("k", text) for text, *_ in notes],
    )
    return InputBundle(Bundle(place, place, 1, Instant(0), records, records.keys(["key"], HASHER)), INSTANT_MAX)


@pytest.mark.parametrize("windows", [FixedWindows(milliseconds(1)), SessionWindows(milliseconds(1))], ids=repr)
@pytest.mark.parametrize("few_records_max", [0, 100], ids=["columns", "rows"])
def test_late_and_refused_records_are_those_of_their_input(windows: Windows, few_records_max: int) -> None:
    aggregates = {"n": Count(), "last": Max("text")}
    logic = WindowedLogic(windows, seconds(0), aggregates, few_records_max=few_records_max)
    inputs = tuple(InputSpec(name, TYPE, ("key",), (str,), True) for name in ("north", "south"))
    output = logic.output_type(TYPE, ["key"])
    binding = StageBinding("subject", inputs, {"out": output}, {}, frozenset(["out"]), Limits())
    interval = logic.bind(binding).open(StoredInterval(1, 1))

    late, fresh, nul = ("late", 100, 50_000), ("fresh", 60_000, 50_000), ("\0", 60_000, 50_000)
    work = [arrived(0, [late, fresh]), arrived(1, [fresh, late, nul, late])]
    result = interval.step(Work(1, work, Instant(0), Instant(50_000), Instant(0)))
    result_at_end = interval.step(Work(2, [], Instant(50_000), INSTANT_MAX, Instant(0)))

    assert result.late_by_input == {0: 1, 1: 2}
    assert result.dead_lettered_by_input == {1: 1}
    assert [(dead_letter.stream, dead_letter.input) for dead_letter in result.dead_letters] == [("south", 1)]
    assert {(rows.stream, rows.input): len(rows) for rows in result.late} == {("north", 0): 1, ("south", 1): 2}
    assert [pane.n for pane in result_at_end.productions["out"].objects()] == [2]

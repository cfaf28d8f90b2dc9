"""What counts as lost, doubled and changed."""

from __future__ import annotations

from millpy.testing.crash_test.compare import ComparedTable, RowChange, differences, unsteady

WINDOWS = [("a", 0, 3, 1.5), ("a", 60, 2, 2.0), ("b", 0, 1, 9.0)]
MARKS = [("a", "full", 10, 1.0), ("b", "full", 10, 2.0), ("b", "full", 20, 2.5)]


def windows(rows: list[tuple]) -> ComparedTable:
    return ComparedTable("per_minute", ("device", "window_start"), ("n", "mean"), rows)


def marks(rows: list[tuple]) -> ComparedTable:
    return ComparedTable("marks", (), ("device", "kind", "event_time", "value"), rows)


def changes(reference: ComparedTable, run: ComparedTable) -> list[tuple[RowChange, tuple]]:
    return [(found.change, tuple(found.identity.values())) for found in differences(reference, run)]


def test_equal_tables_have_no_differences_whatever_their_order() -> None:
    assert changes(windows(WINDOWS), windows(WINDOWS[::-1])) == []
    assert changes(marks(MARKS), marks(MARKS[::-1])) == []


def test_sums_of_floats_agree_to_nine_digits() -> None:
    rounded = 1.0 + 3e-16

    assert changes(windows([("a", 0, 1, 1.0)]), windows([("a", 0, 1, rounded)])) == []
    assert changes(marks([("a", "k", 1, 1.0)] * 2), marks([("a", "k", 1, rounded), ("a", "k", 1, 1.0)])) == []
    assert len(changes(marks([("a", "k", 1, 1.0)]), marks([("a", "k", 1, 1.001)]))) == 1


def test_missing_window_is_lost() -> None:
    assert changes(windows(WINDOWS), windows(WINDOWS[1:])) == [(RowChange.LOST, ("a", 0))]


def test_window_with_other_values_is_changed_and_names_the_columns() -> None:
    (found,) = differences(windows(WINDOWS), windows([("a", 0, 4, 1.5), *WINDOWS[1:]]))

    assert found.change is RowChange.CHANGED
    assert found.columns == ("n",)
    assert (found.expected, found.found) == ({"n": 3, "mean": 1.5}, {"n": 4, "mean": 1.5})


def test_extra_window_is_changed() -> None:
    (found,) = differences(windows(WINDOWS), windows([*WINDOWS, ("z", 0, 1, 1.0)]))

    assert (found.change, found.expected) == (RowChange.CHANGED, None)


def test_row_that_occurs_twice_is_doubled() -> None:
    assert changes(marks(MARKS), marks([*MARKS, MARKS[1]])) == [(RowChange.DOUBLED, (10, "b", "full"))]


def test_missing_row_is_lost() -> None:
    assert changes(marks(MARKS), marks(MARKS[:2])) == [(RowChange.LOST, (20, "b", "full"))]


def test_row_of_the_same_time_with_other_values_is_changed() -> None:
    (found,) = differences(marks(MARKS), marks([*MARKS[:2], ("b", "full", 20, 7.0)]))

    assert (found.change, found.columns) == (RowChange.CHANGED, ("value",))
    assert found.expected is not None
    assert found.expected["value"] == 2.5


def test_one_lost_and_one_doubled_do_not_cancel_out() -> None:
    found = differences(marks(MARKS), marks([MARKS[0], MARKS[0], MARKS[1]]))

    assert sorted(difference.change for difference in found) == [RowChange.DOUBLED, RowChange.LOST]


def test_column_that_two_references_disagree_about_is_named() -> None:
    other = [(device, start, n, mean + 1) for device, start, n, mean in WINDOWS]

    wavers = unsteady(windows(WINDOWS), windows(other))

    assert (wavers.columns, wavers.rows) == ({"mean"}, False)
    assert len(wavers.differences) == 3


def test_column_of_rows_without_keys_is_named_too() -> None:
    other = [(device, kind, at, value * 3) for device, kind, at, value in MARKS]

    wavers = unsteady(marks(MARKS), marks(other))

    assert (wavers.columns, wavers.rows) == ({"value"}, False)


def test_unstable_rows_are_distinguished_from_unstable_columns() -> None:
    assert unsteady(windows(WINDOWS), windows(WINDOWS[1:])).rows
    assert unsteady(marks(MARKS), marks(MARKS[1:])).rows
    assert not unsteady(windows(WINDOWS), windows(WINDOWS))


def test_columns_can_be_dropped() -> None:
    assert windows(WINDOWS).drop_columns({"mean"}).rows == [("a", 0, 3), ("a", 60, 2), ("b", 0, 1)]

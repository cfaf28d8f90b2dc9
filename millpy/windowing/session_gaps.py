"""The gaps of sessions: one for all, one for a key, or one for each record, from a field.

A session of bounded length is made by gaps, too: that of a record ends at the next cut at the latest. Records on both
sides of a cut then never meet, whatever their order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from millpy.errors import RefusedValueError, SchemaError
from millpy.model.keys import Key
from millpy.model.record import SMALL_RECORDS_MAX, Instants, Mask, Records, RecordType, column_of, getter
from millpy.model.time import YEARS_HI, YEARS_LO, duration_text, microseconds
from millpy.windowing.window import SessionWindows

_SECOND_US = 1_000_000


def check_gap_field(windows: object, record_type: RecordType) -> None:
    """Check that records have the field with the gap of their session.

    Raises:
        SchemaError: the field does not exist, or is not a number.
    """
    if not isinstance(windows, SessionWindows) or not windows.by_field:
        return
    found = record_type.field_type(windows.by_field)
    if found not in (int, float):
        raise SchemaError(
            f"field {windows.by_field!r} is {found.__name__}, and a session gap is a number of seconds",
            hint="name a field of int or float, or add one with map()",
        )


class Gaps:
    """The session gaps of keys and of records, in µs.

    Attributes:
        by_field: whether records have gaps in a field.
        by_row: whether records of one key have different gaps.
    """

    def __init__(self, windows: SessionWindows) -> None:
        self._gap_us = microseconds(windows.gap)
        self._by_key = {key: microseconds(gap) for key, gap in windows.by_key}
        self._field = windows.by_field
        self._max_us = microseconds(windows.max_gap)
        self._length_us = 0 if windows.max_length is None else microseconds(windows.max_length)
        self.by_field = bool(windows.by_field)
        self.by_row = self.by_field or self._length_us > 0

    def gap_of(self, key: Key) -> int:
        """Return the gap of a key, in µs."""
        return self._by_key.get(key, self._gap_us)

    def gaps_of(self, keys: list[Key]) -> npt.NDArray[np.int64]:
        """Return the gaps of several keys, in µs."""
        if not self._by_key:
            return np.full(len(keys), self._gap_us, np.int64)
        return np.array([self.gap_of(key) for key in keys], np.int64)

    def of_rows(self, records: Records, by_key: Instants) -> Instants:
        """Return the gaps of records, in µs, given those of their keys; none of them is refused."""
        gaps = by_key
        if self.by_field:
            seconds, given = self._seconds(records)
            us = np.rint(np.where(given, seconds, 0) * _SECOND_US).astype(np.int64)
            gaps = np.where(given, us, by_key)
        if not self._length_us:
            return gaps
        return np.minimum(gaps, self._length_us - records.event_times % self._length_us)

    def refused(self, records: Records) -> Mask:
        """Return which records have a gap that is shorter than a µs, longer than the longest, or not a number."""
        if not self.by_field:
            return np.zeros(len(records), np.bool_)
        seconds, given = self._seconds(records)
        with np.errstate(invalid="ignore", over="ignore"):
            us = seconds * _SECOND_US
            fits: Mask = (us >= 1) & (us <= self._max_us)
        return given & ~fits

    def refusal(self) -> RefusedValueError:
        """Return the error of records whose gap is refused."""
        longest = duration_text(self._max_us)
        return RefusedValueError(f"the session gap in field {self._field!r} is not between 1 µs and max_gap={longest}")

    def _seconds(self, records: Records) -> tuple[npt.NDArray[np.float64], Mask]:
        """Return the gaps that records have, in seconds, and which of them have one. Floats are exact here."""
        if len(records) <= SMALL_RECORDS_MAX:
            read = getter(self._field)
            found = [read(record) for record in records.objects()]
            given: Mask = np.array([seconds is not None for seconds in found], np.bool_)
            return np.array([seconds or 0 for seconds in found], np.float64), given
        column = column_of(records.batch(), self._field)
        given = column.is_valid().to_numpy(zero_copy_only=False)
        return pc.fill_null(column, 0).to_numpy(zero_copy_only=False).astype(np.float64), given

    def event_time_range(self) -> tuple[int, int]:
        """Return the first and last event time, in µs, at which a session of any key lies in the years 1 to 9999."""
        longest = max([self._gap_us, *self._by_key.values(), self._max_us if self.by_field else 0])
        return YEARS_LO, YEARS_HI - longest

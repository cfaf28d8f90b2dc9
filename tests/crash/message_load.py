"""Messages over a broker and their expected results. Every field follows from the number of the message.

The oracle groups columns with numpy; it shares nothing with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import psycopg

from tests.crash.checks import US, Fault, differences, unique

DEVICES = 50
WINDOW_US = 2_000_000
END_SEQ = 10**12
DAY_US = 86_400_000_000


@dataclass(frozen=True)
class MessageLoad:
    """A feed: message i happens at `start_us + i * step_us`; every so-manieth of a device is marked."""

    start_us: int
    step_us: int
    every: int = 1

    def payload(self, seq: int) -> bytes:
        """Message number `seq`."""
        at_us = self.start_us + seq * self.step_us
        return b'{"device":%d,"seq":%d,"at_us":%d,"value":%d}' % (seq * 7919 % DEVICES, seq, at_us, seq * 31 % 1_000)

    def end(self, after: int) -> bytes:
        """A message that closes every window of the `after` messages before it."""
        at_us = self.end_us(after) + DAY_US
        return b'{"device":-1,"seq":%d,"at_us":%d,"value":0}' % (END_SEQ, at_us)

    def end_us(self, after: int) -> int:
        """An instant after all windows."""
        return self.start_us + after * self.step_us + WINDOW_US

    def faults(self, url: str, sent: np.ndarray) -> list[Fault]:
        """Return the faults of the final tables.

        Args:
            url: the database.
            sent: numbers of the messages that must have had an effect, int64, in the order sent.
        """
        windows, marks = self._expected(sent)
        with psycopg.connect(url, autocommit=True) as connection:
            rows = connection.execute(
                f"SELECT device, {US.format('window_start')}, n, total, low, high, late_count"
                " FROM messages.per_window WHERE device >= 0"
            ).fetchall()
            found, twice = unique("per_window", rows, 2)
            marked = connection.execute("SELECT device, number, total FROM messages.marks WHERE device >= 0").fetchall()
            found_marks, twice_marked = unique("marks", marked, 2)
            late = connection.execute("SELECT count(*) FROM mill.late_records").fetchone()
        return [
            *twice,
            *twice_marked,
            *differences("per_window", found, windows),
            *differences("marks", {key: (1, *value) for key, value in found_marks.items()}, marks),
            *differences("late records", {"late": late[0] if late else 0}, {"late": 0}),
        ]

    def _expected(self, sent: np.ndarray) -> tuple[dict, dict]:
        device, value = sent * 7919 % DEVICES, sent * 31 % 1_000
        at = self.start_us + sent * self.step_us
        window = at - at % WINDOW_US
        order = np.lexsort((np.arange(len(sent)), window, device))
        device_, window_, value_ = device[order], window[order], value[order]
        first = np.flatnonzero(np.r_[True, (np.diff(device_) != 0) | (np.diff(window_) != 0)])
        counts = np.diff(np.r_[first, len(sent)])
        columns = [
            np.add.reduceat(value_, first),
            np.minimum.reduceat(value_, first),
            np.maximum.reduceat(value_, first),
        ]
        keys = zip(device_[first].tolist(), window_[first].tolist(), strict=True)
        values = zip(counts.tolist(), *(column.tolist() for column in columns), [0] * len(first), strict=True)
        marks = {}
        for name in range(DEVICES):
            totals = np.cumsum(value[device == name])[self.every - 1 :: self.every].tolist()
            marks.update({(name, (i + 1) * self.every): (1, total) for i, total in enumerate(totals)})
        return dict(zip(keys, values, strict=True)), marks

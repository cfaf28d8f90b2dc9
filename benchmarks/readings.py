"""The input files of W1 and W4: JSON lines of about 112 bytes, one per millisecond, a tenth delayed.

Deterministic: the same arguments write the same bytes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

START_MS = 1_767_225_600_000
DELAYED_SHARE = 0.1
DELAY_MS_MEAN = 500.0
LINES_AT_ONCE = 100_000


def write_readings(path: Path, records: int, devices: int, *, value: str, seed: int = 1) -> float:
    """Write the file in order of arrival; returns the mean length of a line in bytes.

    Args:
        path: the file to make.
        records: how many; number i happens at START_MS + i.
        devices: how many keys, each record's drawn uniformly.
        value: name of the field with the reading.
        seed: of everything that is drawn.
    """
    random = np.random.default_rng(seed)
    delays = np.where(random.random(records) < DELAYED_SHARE, random.exponential(DELAY_MS_MEAN, records), 0.0)
    order = np.argsort(np.arange(records) + delays, kind="stable")
    device = random.integers(0, devices, records)
    reading = random.normal(21.0, 3.0, records).round(3)
    humidity = random.uniform(20.0, 80.0, records).round(2)
    line = '{"device":"dev-%06d","event_ms":%d,"' + value + '":%.3f,"humidity":%.2f,"seq":%d,"site":"h%02d"}\n'
    with path.open("w") as file:
        for start in range(0, records, LINES_AT_ONCE):
            rows = order[start : start + LINES_AT_ONCE]
            columns = zip(
                device[rows].tolist(),
                (START_MS + rows).tolist(),
                reading[rows].tolist(),
                humidity[rows].tolist(),
                rows.tolist(),
                (device[rows] % 17).tolist(),
                strict=True,
            )
            file.write("".join([line % fields for fields in columns]))
    return path.stat().st_size / records

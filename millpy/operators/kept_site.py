"""The site of a record stays: what operators make of a record must name its site, by whose watermark it is judged."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from millpy.errors import RefusedValueError
from millpy.model.keys import KeyHasher
from millpy.model.record import Records
from millpy.operators.stateless import ChainOutput


def with_kept_sites(before: Records, passed: ChainOutput, site: str, hasher: KeyHasher) -> ChainOutput:
    """Return the output of operators without the records whose site is another than before; their originals failed.

    If one of the records made of an original has another site, all of them are left out.

    Args:
        before: the records before the operators.
        passed: the output of the operators.
        site: the field that names the site, before and behind.
        hasher: a cache of key hashes.
    """
    if not len(passed.records):
        return passed
    rows = np.arange(len(before)) if passed.rows is None else passed.rows
    was, now = before.keys((site,), hasher), passed.records.keys((site,), hasher)
    known = {value: code for code, value in enumerate(was.keys)}
    same = np.array([known.get(value, -1) for value in now.keys], np.int64)[now.codes] == was.codes[rows]
    if same.all():
        return passed
    moved: npt.NDArray[np.int64] = np.unique(rows[~same])
    failures = [
        (row, RefusedValueError(f"an operator has changed {site!r}, by which watermarks go; map it to another field"))
        for row in moved.tolist()
    ]
    left_out = np.isin(rows, moved)
    kept = np.flatnonzero(~left_out)
    return replace(
        passed,
        records=passed.records.take(kept),
        rows=rows[kept],
        failures=sorted([*passed.failures, *failures], key=lambda failure: failure[0]),
        labels=None if passed.labels is None else passed.labels[kept],
        added=passed.added - (int(np.count_nonzero(left_out)) - len(moved)),
    )

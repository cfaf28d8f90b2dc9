"""From when on the results of a computation follow its present description, after changes that stored state survives.

A deployment marks each computation whose lateness, operators or inputs change with an instant in µs: records from
before may have been treated by the earlier description. The mark is the later of the server's clock and the watermark
that the computation had reached. Windows that begin behind it have only records of the present description, so that an
audit may recount them; earlier windows keep the results that they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millpy.model.time import INSTANT_MIN

CHANGED = "changed_us"
"""Key in a described computation: its newest mark."""


def with_marks(description: Mapping[str, Any], stored: Mapping[str, Any], marks: Mapping[str, int]) -> dict[str, Any]:
    """Return a description with the marks of the stored one, and new ones.

    Args:
        description: the description to store.
        stored: the description that it replaces.
        marks: computation -> its new mark.
    """
    computations = {}
    for name, computation in description["computations"].items():
        at = marks.get(name, stored["computations"].get(name, {}).get(CHANGED))
        computations[name] = computation if at is None else {**computation, CHANGED: at}
    return {**description, "computations": computations}


def changed_since(description: Mapping[str, Any], computation: str) -> int:
    """Return the newest mark of a computation and of all those whose records it reads; INSTANT_MIN without one."""
    found, left, newest = {computation}, [computation], INSTANT_MIN
    while left:
        name = left.pop()
        newest = max(newest, description["computations"].get(name, {}).get(CHANGED, INSTANT_MIN))
        for producer in _producers(description, name):
            if producer not in found:
                found.add(producer)
                left.append(producer)
    return newest


def _producers(description: Mapping[str, Any], consumer: str) -> Iterable[str]:
    for subscription in description["subscriptions"]:
        if subscription["consumer"] == consumer:
            yield description["streams"][subscription["stream"]]["producer"]

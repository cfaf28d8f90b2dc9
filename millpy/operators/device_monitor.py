"""Computations that tell operators of devices: by events in the commit, and by gauges kept with the counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from millpy.computation import Computation, MapCell
from millpy.model.checkpoint import NOTICE_NAMES_MAX, Notice


class DeviceMonitor(Computation):
    """A computation of ours whose records tell of devices.

    Attributes:
        gauges: name of a gauge -> the cell whose entries it counts, over all keys. `IntervalState.counters` has it
            under this name and the subkey "".
    """

    gauges: ClassVar[Mapping[str, MapCell[Any, Any]]] = {}

    def notices(self, records: Sequence[Any]) -> list[Notice]:
        """Return notices of the records that one step has made, at most one of each kind."""
        raise NotImplementedError


def notice(kind: str, names: Sequence[str]) -> Notice:
    """Return a notice of devices, named once for each change."""
    return Notice(kind, len(names), tuple(dict.fromkeys(names))[:NOTICE_NAMES_MAX])

"""Horizons that change while state is stored: the allowed lateness of windows, and the horizons of ids.

A longer one does not bring back what is gone. When it grows, each interval remembers a floor in its header:

    windows      those that end by the floor were over: the input watermark had reached their end + the earlier lateness
    dedupe ids   those that were last seen before the floor were forgotten; a `deduplicate` step forgets an id at
                 2 · within behind the watermark, and no longer judges records from before the floor: they are late

So a record behind the change is judged by two rules, both functions of the order of input and of the place of the
change in it (I9): the present horizon, and the floor. A floor never falls, so any number of changes adds up. A shorter
horizon needs no floor: what is beyond it is over or forgotten from the change on. For windows by site a floor would be
wrong, as the watermark of the interval says nothing of the sites; so their lateness can shrink, and cannot grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LATENESS = "allowed_lateness_us"
"""Setting of a windowed step: how long after its end a window takes late records, in µs."""
HORIZON = "within_us"
"""Setting of a source with dedupe ids: for how long an id is remembered, in µs."""
KEPT = "deduplicated_within_us"
"""Setting of a `deduplicate` step: how far apart records of one id are duplicates, in µs of event time."""
HORIZONS = (LATENESS, HORIZON, KEPT)


@dataclass(frozen=True, slots=True)
class HorizonChange:
    """A horizon of one computation that changes.

    Attributes:
        computation: name of the windowed step, or of the source.
        setting: one of `HORIZONS`.
        before_us: the earlier horizon.
        after_us: the new one.
    """

    computation: str
    setting: str
    before_us: int
    after_us: int

    @property
    def grows(self) -> bool:
        """Whether the new horizon is the longer one."""
        return self.after_us > self.before_us

    @property
    def floor_us(self) -> int:
        """How far the floor is behind the clock of the interval: the watermark, or that of dedupe ids."""
        return 2 * self.before_us if self.setting == KEPT else self.before_us

    @property
    def longer_us(self) -> int:
        """How much longer ids are to be stored, in µs; not positive if they are not."""
        if self.setting == LATENESS:
            return 0
        return (self.after_us - self.before_us) * (2 if self.setting == KEPT else 1)


def horizon_changes(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[HorizonChange]:
    """Return the horizons that differ between the descriptions of a deployed and a wanted graph."""
    found = []
    for name, computation in wanted["computations"].items():
        before = stored["computations"].get(name, {"settings": {}})["settings"]
        for setting in HORIZONS:
            was, now = before.get(setting), computation["settings"].get(setting)
            if was is not None and now is not None and was != now:
                found.append(HorizonChange(name, setting, was, now))
    return found


def effect_of(setting: str, before_us: int, after_us: int) -> str:
    """Return what a change of a horizon does, to be added to its description; "" for another setting."""
    if setting == LATENESS:
        over = "windows that are over stay over" if after_us > before_us else "windows beyond it are over at once"
        return f"; {over}"
    if setting == KEPT and after_us > before_us:
        return "; forgotten ids stay forgotten, and records from before them are late"
    if setting in (HORIZON, KEPT):
        return f"; {'forgotten ids stay forgotten' if after_us > before_us else 'ids beyond it are forgotten at once'}"
    return ""


def by_site(computation: str, description: Mapping[str, Any]) -> bool:
    """Tell whether a computation reads a source whose sites have a watermark each."""
    for subscription in description["subscriptions"]:
        if subscription["consumer"] == computation:
            producer = description["streams"][subscription["stream"]]["producer"]
            time = description["computations"][producer]["identity"].get("event_time") or {}
            if "watermark_by" in time:
                return True
    return False

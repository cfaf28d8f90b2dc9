"""Watermarks by site, in a source partition: one for each value of the field in `EventTime(watermark_by=…)`.

A site has the watermark of a source that has no other site: the largest event time so far minus the disorder bound.
It begins with the site's first record, before which nothing of the site is late. So a site that is silent, behind, or
ahead of its time delays or closes its own windows only.

`Limits.sites_max` sites have a watermark of their own. All later ones share one, as the devices of a source without
sites do: a device that invents sites costs no memory, and harms only other new sites. Which sites are among the first
depends on the order of the records alone.

Everything is stored with the bundle that moves it: kind SITE, namespace "source", one entry a site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from millpy.ingest.dead_letters import DeadLetterCollector
from millpy.model.checkpoint import Entries, Kind
from millpy.model.dead_letter import key_problem
from millpy.model.keys import KeyHasher, key_texts
from millpy.model.record import SMALL_RECORDS_MAX, Instants, Mask, Records, RecordType
from millpy.model.sites import FLOOR, OTHERS, SiteProgress
from millpy.model.time import INSTANT_MIN, Instant

NAMESPACE = "source"
NO_KEY = b'""'


class SiteState(msgspec.Struct, omit_defaults=True):
    """A site as it is stored; views read it by name.

    Attributes:
        watermark: nothing before it is still to come, µs.
        max_event_time: the largest event time, at most that of arrival.
        arrived_at: wall time at which its newest record was taken.
        records: of the shared watermark: the number of records beyond the bound of sites.
    """

    watermark: int = INSTANT_MIN
    max_event_time: int = INSTANT_MIN
    arrived_at: int = INSTANT_MIN
    records: int = 0


@dataclass(frozen=True, slots=True)
class SiteColumn:
    """The sites of n records.

    Attributes:
        codes: int[n], the index of each record's site in `names`.
        names: the distinct sites, as JSON text.
    """

    codes: npt.NDArray[np.integer]
    names: list[str]

    def take(self, rows: npt.NDArray[np.int64]) -> SiteColumn:
        """Return the sites of the given rows; `names` stays."""
        return SiteColumn(self.codes[rows], self.names)


def sites_of(letters: DeadLetterCollector, fresh: Mask, record_type: RecordType, field: str) -> SiteColumn:
    """Return the site of each decoded record. Dead-letter fresh records whose site cannot be stored.

    Args:
        letters: the decoded records, and their dead letters.
        fresh: which are to be judged; those that are dead-lettered here are no longer.
        record_type: the type of the records.
        field: the field that names the site.
    """
    decoded = letters.decoded
    records = Records(record_type, np.zeros(len(fresh), np.int64), batch=decoded.batch, objects=decoded.objects)
    keys = records.keys((field,), KeyHasher())
    names = key_texts(keys.keys)
    for code, name in enumerate(names):
        if problem := key_problem(name):
            which = fresh & (keys.codes == code)
            letters.add(which, "key", f"{field} names the site: {problem}")
            fresh &= ~which
    return SiteColumn(keys.codes, [name.decode() for name in names])


class SiteWatermarks:
    """The watermarks of the sites of one source partition.

    Args:
        bound_us: the disorder bound in µs.
        sites_max: the most sites with a watermark of their own.
        recovered: the stored entries.
    """

    def __init__(self, bound_us: int, sites_max: int, recovered: Sequence[Entries] = ()) -> None:
        self._bound_us = bound_us
        self._sites_max = sites_max
        self._sites: dict[str, SiteState] = {}
        self._others: SiteState | None = None
        self._floor = int(INSTANT_MIN)
        self._heard: dict[str, int] = {}
        self._told: set[str] = set()  # the sites of records, and those that have moved, since the last progress
        self._changed: set[str] = set()  # those to write
        for entries in recovered:
            if entries.kind is Kind.SITE and entries.namespace == NAMESPACE:
                self._absorb(entries)

    def _absorb(self, entries: Entries) -> None:
        for subkey, value in zip(entries.subkeys, entries.values, strict=True):
            assert value is not None, "never deleted"
            if subkey == FLOOR:
                self._floor = int(value)
            elif subkey == OTHERS:
                self._others = msgspec.json.decode(value, type=SiteState)
            else:
                self._sites[subkey] = msgspec.json.decode(value, type=SiteState)

    def __len__(self) -> int:
        return len(self._sites)

    def _named(self) -> Iterator[tuple[str, SiteState]]:
        yield from self._sites.items()
        if self._others is not None:
            yield OTHERS, self._others

    @property
    def watermark(self) -> Instant:
        """The least watermark of all sites; that of the source itself as long as there are none."""
        least = min((site.watermark for _, site in self._named()), default=self._floor)
        return Instant(max(least, self._floor))

    def watermarks(self) -> dict[str, Instant]:
        """Return the watermark of each site; `OTHERS` has that of the sites beyond the bound."""
        return {name: Instant(max(site.watermark, self._floor)) for name, site in self._named()}

    def highest(self, by_site: SiteColumn, happened: Instants) -> Instants:
        """Return, for each row, the largest event time so far of its site, or of all sites beyond the bound.

        Args:
            by_site: the site of each row.
            happened: the event times, at most that of arrival; INSTANT_MIN for a row that is not accepted.
        """
        highest = happened.copy()
        accepted = np.flatnonzero(happened > INSTANT_MIN)
        for place, found in self._by_place(by_site.take(accepted)):
            rows = accepted[found]
            known = self._others if place == OTHERS else self._sites.get(place)
            highest[rows] = np.maximum.accumulate(happened[rows])
            if known is not None:
                highest[rows] = np.maximum(highest[rows], known.max_event_time)
        return highest

    def _by_place(self, by_site: SiteColumn) -> list[tuple[str, npt.NDArray[np.int64]]]:
        """Return (site, its rows), the first sites first; `OTHERS` for all for which there is no place."""
        found: list[tuple[str, npt.NDArray[np.int64]]] = []
        shared: list[npt.NDArray[np.int64]] = []
        places = self._sites_max - len(self._sites)
        for code, rows in sorted(_rows_by_code(by_site.codes), key=lambda group: int(group[1][0])):
            name = by_site.names[code]
            if name not in self._sites and places <= 0:
                shared.append(rows)
                continue
            places -= name not in self._sites
            found.append((name, rows))
        if shared:
            found.append((OTHERS, np.sort(np.concatenate(shared))))
        return found

    def take(
        self,
        by_site: SiteColumn,
        happened: Instants,
        *,
        arrived_at: Instant,
        elapsed_us: int,
    ) -> tuple[Instants, Instants]:
        """Move sites on by the records of a bundle.

        Args:
            by_site: the site of each row.
            happened: the event times, at most that of arrival.
            arrived_at: wall time of the bundle.
            elapsed_us: elapsed time, for `advance_silent`.

        Returns:
            The watermark of its site before each row, and the largest event time of its site before each row.
        """
        before, watermarks = (np.empty(len(happened), np.int64) for _ in range(2))
        for name, rows in self._by_place(by_site):
            if name == OTHERS:
                site = self._others = self._others or SiteState()
                site.records += len(rows)
            else:
                site = self._sites.setdefault(name, SiteState())
            self._move(name, site, rows, happened, before, watermarks)
            self._hear(name, site, arrived_at, elapsed_us)
        return watermarks, before

    def _known(self, name: str) -> SiteState | None:
        if name in self._sites:
            return self._sites[name]
        return self._others if len(self._sites) >= self._sites_max else None

    def _move(
        self,
        name: str,
        site: SiteState,
        rows: npt.NDArray[np.int64],
        happened: Instants,
        before: Instants,
        watermarks: Instants,
    ) -> None:
        """Fill in `before` and `watermarks` of a site's rows, and move the site behind them."""
        largest, least = site.max_event_time, max(site.watermark, self._floor)
        if len(rows) <= SMALL_RECORDS_MAX:
            for row in rows.tolist():
                before[row], watermarks[row] = largest, max(largest - self._bound_us, least)
                largest = max(largest, int(happened[row]))
        else:
            ordered = np.empty(len(rows) + 1, np.int64)
            ordered[0], ordered[1:] = largest, happened[rows]
            np.maximum.accumulate(ordered, out=ordered)
            before[rows] = ordered[:-1]
            watermarks[rows] = np.maximum(ordered[:-1] - self._bound_us, least)
            largest = int(ordered[-1])
        site.max_event_time = largest
        site.watermark = max(site.watermark, largest - self._bound_us)

    def _hear(self, name: str, site: SiteState, arrived_at: Instant, elapsed_us: int) -> None:
        site.arrived_at = max(site.arrived_at, arrived_at)
        self._heard[name] = elapsed_us
        self._told.add(name)
        self._changed.add(name)

    def current(self, by_site: SiteColumn, happened: Instants, *, arrived_at: Instant, elapsed_us: int) -> Instants:
        """Return the current watermark of each row's site. Only sites that are new are moved, as by `take`."""
        states = [self._known(name) for name in by_site.names]
        found = [INSTANT_MIN if state is None else max(state.watermark, self._floor) for state in states]
        watermarks: Instants = np.array(found, np.int64)[by_site.codes]
        new = np.flatnonzero(np.array([state is None for state in states], bool)[by_site.codes])
        if len(new):
            some = by_site.take(new)
            watermarks[new], _ = self.take(some, happened[new], arrived_at=arrived_at, elapsed_us=elapsed_us)
        return watermarks

    def advance_all(self, watermark: int) -> None:
        """Let the source state that nothing before `watermark` comes any more, from whatever site."""
        if watermark > self._floor:
            self._floor = watermark
            self._told.add(FLOOR)
            self._changed.add(FLOOR)

    def advance_silent(self, to: int, *, silent_before_us: int, step_us: int) -> None:
        """Let the sites that were silent since `silent_before_us` (elapsed time) follow the clock to `to`.

        A watermark moves by at least `step_us`: one that follows the clock must not cost a write in every turn.
        """
        for name, site in self._named():
            if self._heard.get(name, 0) <= silent_before_us and to >= max(site.watermark + step_us, self._floor):
                site.watermark = to
                self._told.add(name)
                self._changed.add(name)

    def begin_silence(self, elapsed_us: int) -> None:
        """Let the silence of every site begin now at the earliest, because the source is not known to be read up."""
        self._heard = {name: elapsed_us for name, _ in self._named()}

    def take_progress(self) -> SiteProgress | None:
        """Return what consumers must know of the records and moves since the last call; None if there are none."""
        if not self._told:
            return None
        others = self._others.watermark if self._others is not None and OTHERS in self._told else None
        progress = SiteProgress(
            self._floor, others, {name: self._sites[name].watermark for name in sorted(self._told & self._sites.keys())}
        )
        self._told.clear()
        return progress

    def take_entries(self) -> tuple[Entries, ...]:
        """Return what has changed since the last write, and mark it written."""
        if not self._changed:
            return ()
        found = Entries(Kind.SITE, NAMESPACE)
        for name in sorted(self._changed):
            if name == FLOOR:
                found.add(NO_KEY, 0, name, b"%d" % self._floor)
            else:
                site = self._others if name == OTHERS else self._sites[name]
                found.add(NO_KEY, 0, name, msgspec.json.encode(site))
        self._changed.clear()
        return (found,)


def _rows_by_code(codes: npt.NDArray[np.integer]) -> list[tuple[int, npt.NDArray[np.int64]]]:
    """Return (code, its rows in order) for each code that occurs."""
    if not len(codes):
        return []
    order = np.argsort(codes, kind="stable")
    ordered = codes[order]
    ends = [*(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), len(codes)]
    starts = [0, *ends[:-1]]
    return [(int(ordered[start]), order[start:end]) for start, end in zip(starts, ends, strict=True)]

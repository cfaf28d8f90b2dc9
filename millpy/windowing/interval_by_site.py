"""A key interval of windows over sites, each with a watermark of its own (`EventTime(watermark_by=…)`).

The key of the windows names the site, so the windows of two sites have nothing in common. Each site has soft state of
its own, of the same class as an interval without sites, and is stepped by its own watermark: its windows are what they
would be if the site had a graph of its own. What is stored has the same form, and is divided by key when it is read.

A step costs one step of each site that has records or due windows in the turn. All sites of an interval share its
bounds on memory and on the panes of a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millpy.model.bundle import Bundle
from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, key_from_text, key_text
from millpy.model.record import Instants, Records, concat
from millpy.model.stage import (
    InputBundle,
    ResidentInterval,
    StageBinding,
    StepResult,
    StoredInterval,
    WindowCorrection,
    Work,
)
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.windowing.ahead import NAMESPACE as KEYS_AHEAD
from millpy.windowing.operator import WindowedInterval
from millpy.windowing.site_registry import SiteRegistry

OpenSite = Callable[[StageBinding, StoredInterval], WindowedInterval[Any]]
NO_KEY = b'""'


@dataclass(slots=True)
class _Site:
    """The windows of one place (a site, or the sites beyond the bound), and when they are due.

    Attributes:
        due: the watermark at which a window fires or expires.
        alarm: the processing time at which a pane is due.
        oldest: the event time of the next pane.
    """

    windows: WindowedInterval[Any]
    due: Instant = INSTANT_MAX
    alarm: Instant = INSTANT_MAX
    oldest: Instant = INSTANT_MAX

    def is_due(self, watermark: Instant) -> bool:
        """Tell whether a window fires or expires at a watermark."""
        return self.due <= watermark and self.due < INSTANT_MAX

    def look(self) -> None:
        """Ask the windows when they are due."""
        self.due, self.alarm = self.windows.next_due()
        self.oldest = self.windows.oldest_work()


class IntervalBySite(ResidentInterval):
    """Soft state of one key interval: the open windows of each site.

    Args:
        open_site: builds the windows of one site from their stored state.
        binding: what the stage knows of the graph.
        recovered: the stored state.
    """

    def __init__(self, open_site: OpenSite, binding: StageBinding, recovered: StoredInterval) -> None:
        self._open_site = open_site
        self._binding = binding
        own = binding.inputs[0]
        self._key_types = own.key_types
        self._index = own.key_fields.index(own.site)
        self._stored = replace(recovered, entries=())
        self.immediate = open_site(binding, self._stored).immediate
        self._registry = SiteRegistry(recovered.entries)
        self._sites: dict[str, _Site] = {}
        self._bytes = 0
        for place, entries in self._by_place(recovered.entries).items():
            site = self._sites[place] = self._opened(place, entries)
            site.look()
            self._bytes += site.windows.open_bytes
        self._look()

    def _opened(self, place: str, entries: Sequence[Entries]) -> _Site:
        """Open the windows of a place, as they were at the beginning of the turn."""
        at = self._registry.before_turn(place)
        return _Site(self._open_site(self._binding, replace(self._stored, input_watermark=at, entries=entries)))

    def _by_place(self, stored: Sequence[Entries]) -> dict[str, list[Entries]]:
        """Divide stored entries by the place of their keys."""
        found: dict[str, dict[int, Entries]] = {}
        places: dict[bytes, str] = {}
        for number, entries in enumerate(stored):
            if entries.kind is Kind.DISORDER:
                found.setdefault(entries.namespace, {})[number] = replace(entries, namespace="")
                continue
            if entries.kind not in (Kind.WINDOW, Kind.POSITION):
                continue
            columns = (entries.keys, entries.key_hashes, entries.subkeys, entries.values, entries.fire_ats)
            for key, hashed, subkey, value, fire_at in zip(*columns, strict=True):
                if _is_of_site(entries.kind, key, subkey):
                    place, subkey = subkey, ""
                elif (known := places.get(key)) is not None:
                    place = known
                else:
                    place = places[key] = self._registry.place_of(self._site_of(key_from_text(key, self._key_types)))
                part = found.setdefault(place, {}).setdefault(number, Entries(entries.kind, entries.namespace))
                part.add(key, hashed, subkey, value, fire_at)
            entries.clear()  # free the stored form
        return {place: list(parts.values()) for place, parts in found.items()}

    def _site_of(self, key: Key) -> str:
        """Return the site in a key, as JSON text."""
        return key_text(key if len(self._key_types) == 1 else key[self._index]).decode()  # type: ignore[index]

    def _look(self) -> None:
        """Compute what all sites hold back, and when one is due."""
        reached = self._registry.reached
        sites = self._sites
        self._oldest = min((site.oldest for site in sites.values()), default=INSTANT_MAX)
        self._alarm = min((site.alarm for site in sites.values()), default=INSTANT_MAX)
        self._is_due = any(site.is_due(reached.get(place, INSTANT_MIN)) for place, site in sites.items())

    def oldest_work(self) -> Instant:
        """Return the event time of the next pane of all sites; INSTANT_MAX without one."""
        return self._oldest

    def next_due(self) -> tuple[Instant, Instant]:
        """Return (when the next window is due, processing time of the next alarm).

        The watermark of the interval says nothing of the sites: work that is due is due at once. Progress of sites
        comes with bundles, so a step follows it in any case.
        """
        return (INSTANT_MIN if self._is_due else INSTANT_MAX), self._alarm

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the windows of each site that has some."""
        registry = self._registry
        registry.begin_turn()
        arrived = self._arrived(work.arrived)
        reached = registry.reached
        due = [
            place
            for place, site in self._sites.items()
            if place not in arrived and (site.is_due(reached.get(place, INSTANT_MIN)) or site.alarm <= work.now_us)
        ]
        corrections = self._corrections(work)
        parts: list[StepResult] = []
        panes_left = work.panes_max
        for place in sorted({*arrived, *due, *corrections}):
            site = self._sites.get(place)
            if site is None:
                site = self._sites[place] = self._opened(place, ())
            # Every site takes a step, if only for one pane: the watermark that is committed for it must have been seen.
            of_site = replace(
                work,
                arrived=arrived.get(place, ()),
                panes_max=max(1, panes_left),
                corrections=corrections.get(place, ()),
            )
            parts.append(self._step(place, site, of_site))
            panes_left -= sum(parts[-1].emitted_by_stream.values())
        self._look()
        result = _merged(parts)
        result.delta = (*result.delta, *registry.take_entries())
        return result

    def _corrections(self, work: Work) -> dict[str, list[WindowCorrection]]:
        """Divide the corrections of a turn by site; whether a window is over, the watermark of its site tells."""
        found: dict[str, list[WindowCorrection]] = {}
        for correction in work.corrections:
            key = key_from_text(correction.window.key, self._key_types)
            found.setdefault(self._registry.place_of(self._site_of(key)), []).append(correction)
        return found

    def _step(self, place: str, site: _Site, work: Work) -> StepResult:
        """Step the windows of one site by its watermark, within what the other sites leave of the memory."""
        windows, registry = site.windows, self._registry
        self._bytes -= windows.open_bytes
        windows.share_memory(self._bytes)
        of_site = replace(
            work,
            watermark_before=registry.before_turn(place),
            watermark=registry.reached.get(place, INSTANT_MIN),
        )
        result = windows.step(of_site)
        for entries in result.delta:
            if entries.kind is Kind.POSITION and entries.namespace != KEYS_AHEAD:  # a key names its site
                entries.subkeys = [place]
            elif entries.kind is Kind.DISORDER:
                entries.namespace = place
        self._bytes += windows.open_bytes
        site.look()
        return result

    def _arrived(self, arrived: Sequence[InputBundle]) -> dict[str, list[InputBundle]]:
        """Divide the turn's bundles by site, each row with the watermark that judges it. Move the sites on.

        A producer's bundle may reach the stage by several inputs. Its sites move behind the last of these.
        """
        registry = self._registry
        judged: list[tuple[Bundle, Instants]] = []
        for place, arrival in enumerate(arrived):
            bundle = arrival.bundle
            if len(bundle):
                judged.append((bundle, self._judging_watermarks(bundle)))
            next_bundle = arrived[place + 1].bundle if place + 1 < len(arrived) else None
            is_last = next_bundle is None or (next_bundle.producer, next_bundle.seq) != (bundle.producer, bundle.seq)
            if is_last and bundle.records.sites is not None:
                registry.apply(bundle.producer, bundle.records.sites)
        found: dict[str, list[InputBundle]] = {}
        for bundle, watermarks in judged:
            for site, part in self._divided(bundle, watermarks):
                found.setdefault(site, []).append(InputBundle(part, INSTANT_MAX))
        return found

    def _judging_watermarks(self, bundle: Bundle) -> Instants:
        """Return, for each row, the watermark of its site by which the row is late.

        It is the row's own, but at most that of the other producers, and at least what the site has reached. A replayed
        record has none of its own.
        """
        sites = [self._site_of(key) for key in bundle.keys.keys]
        bounds = {site: self._registry.bounds(bundle.producer, site) for site in set(sites)}
        of_row = np.array([bounds[site] for site in sites], np.int64)[bundle.keys.codes]
        caps: Instants = of_row[:, 0]
        floors: Instants = of_row[:, 1]
        watermarks = bundle.records.watermarks
        return floors if watermarks is None else np.maximum(np.minimum(watermarks, caps), floors)

    def _divided(self, bundle: Bundle, watermarks: Instants) -> list[tuple[str, Bundle]]:
        """Cut a bundle by the place of its rows; order is kept within each part."""
        places = [self._registry.place_of(self._site_of(key)) for key in bundle.keys.keys]
        judged = bundle.records.with_watermarks(watermarks)
        names = sorted(set(places))
        if len(names) == 1:
            return [(names[0], replace(bundle, records=judged))]
        numbers = {name: number for number, name in enumerate(names)}
        of_row = np.array([numbers[place] for place in places], np.int64)[bundle.keys.codes]
        order = np.argsort(of_row, kind="stable")
        records, sorted_codes = judged.take(order), of_row[order]
        ends = np.searchsorted(sorted_codes, np.arange(len(names)), side="right").tolist()
        found, start = [], 0
        for name, end in zip(names, ends, strict=True):
            if end > start:
                part = replace(bundle, records=records.slice(start, end), keys=bundle.keys.take(order[start:end]))
                found.append((name, part))
            start = end
        return found


def _is_of_site(kind: Kind, key: bytes, subkey: str) -> bool:
    """Tell whether an entry is that of a site as a whole: how far its sliding windows have fired, or its records go."""
    return kind is Kind.POSITION and key == NO_KEY and bool(subkey)


def _merged(parts: Sequence[StepResult]) -> StepResult:
    """Return the effects of the steps of several sites as those of one step."""
    if len(parts) == 1:
        return parts[0]
    result = StepResult()
    entries: dict[tuple[Kind, str], Entries] = {}
    productions: dict[str, list[Records]] = {}
    for part in parts:
        for more in part.delta:
            known = entries.setdefault((more.kind, more.namespace), Entries(more.kind, more.namespace))
            known.extend(more)
        for stream, records in part.productions.items():
            productions.setdefault(stream, []).append(records)
        result.results += part.results
        result.deleted += part.deleted
        result.late += part.late
        result.dead_letters += part.dead_letters
        result.corrected.update(part.corrected)
        result.corrected_windows.update(part.corrected_windows)
        result.unfinished = result.unfinished or part.unfinished
        for total, counted in (
            (result.consumed_by_input, part.consumed_by_input),
            (result.emitted_by_stream, part.emitted_by_stream),
            (result.emitted_by_table, part.emitted_by_table),
            (result.late_by_input, part.late_by_input),
            (result.dead_lettered_by_input, part.dead_lettered_by_input),
        ):
            _count(total, counted)
    result.delta = tuple(entries.values())
    result.productions = {stream: concat(made) for stream, made in productions.items()}
    return result


def _count(total: dict[Any, int], counted: dict[Any, int]) -> None:
    for what, number in counted.items():
        total[what] = total.get(what, 0) + number

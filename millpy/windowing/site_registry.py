"""The watermarks of sites as a key interval of windows knows them: over all its producers, at the consumed positions.

    watermark(site) = min over the producers that have heard of the site, of what they say of it

A producer that has not heard of a site cannot hold it back. When it hears of it later, its own watermark of the site
may be behind; the site's watermark then waits for it, and never moves back (I5): `_at_least` remembers how far it was.

Sites have a place of their own until a producer shares one watermark among those beyond its bound. From then on every
further site is one of the `OTHERS`, whichever producer hears of it, so that no site ever changes its place. The number
of places is therefore at most `Limits.sites_max` for each producer, and one more.

Stored with each bundle: kind SITE; namespace: the producer's interval, or "at_least" for the places; one entry a site.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millpy.model.checkpoint import Entries, Kind
from millpy.model.sites import FLOOR, OTHERS, SiteProgress, SiteView
from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant

PLACES = "at_least"
NO_KEY = b'""'


class SiteRegistry:
    """The sites of one key interval, and the watermark of each.

    Attributes:
        reached: place -> its watermark: a site, or `OTHERS`.
        before: the same at the beginning of the turn, for places that have moved in it.
    """

    def __init__(self, recovered: Iterable[Entries] = ()) -> None:
        self._views: dict[int, SiteView] = {}
        self._outside: dict[int, list[str]] = {}  # by producer, the sites that have no place of their own
        self._at_least: dict[str, int] = {}
        self._shares = False
        self._changed: dict[tuple[str, str], int] = {}
        self.reached: dict[str, Instant] = {}
        self.before: dict[str, Instant] = {}
        for entries in recovered:
            if entries.kind is Kind.SITE:
                self._absorb(entries)
        self._shares = any(view.others is not None for view in self._views.values())
        for producer, view in self._views.items():
            self._outside[producer] = [site for site in view.sites if site not in self._at_least]
        for place in self._at_least:
            self.reached[place] = self._watermark(place)

    def _absorb(self, entries: Entries) -> None:
        for subkey, value in zip(entries.subkeys, entries.values, strict=True):
            assert value is not None, "never deleted"
            watermark = int(value)
            if entries.namespace == PLACES:
                self._at_least[subkey] = watermark
                continue
            view = self._views.setdefault(int(entries.namespace), SiteView())
            if subkey == FLOOR:
                view.floor = watermark
            elif subkey == OTHERS:
                view.others = watermark
            else:
                view.sites[subkey] = watermark

    def __len__(self) -> int:
        return len(self._at_least)

    def begin_turn(self) -> None:
        """Forget what moved in the turn before."""
        self.before.clear()

    def before_turn(self, place: str) -> Instant:
        """Return the watermark of a place at the beginning of the turn."""
        return self.before.get(place, self.reached.get(place, INSTANT_MIN))

    def place_of(self, site: str) -> str:
        """Return the place of a site, which it keeps for ever; a new one is made for a site that is not known."""
        if site in self._at_least:
            return site
        place = OTHERS if self._shares else site
        if place not in self._at_least:
            self._add(place)
        return place

    def bounds(self, producer: int, site: str) -> tuple[Instant, Instant]:
        """Return the bounds of the watermark that judges a record of a site.

        Returns:
            (cap, floor): the least watermark of the other producers that have heard of the site, and the watermark that
            the site has reached, as it may have been closed before this producer heard of it.
        """
        place = site if site in self._at_least else OTHERS if self._shares else site
        others = (self._view_watermark(other, view, place) for other, view in self._views.items() if other != producer)
        cap = min((watermark for watermark in others if watermark is not None), default=INSTANT_MAX)
        return Instant(cap), self.reached.get(place, INSTANT_MIN)

    def apply(self, producer: int, progress: SiteProgress) -> None:
        """Move on by the progress of a producer's next bundle."""
        view = self._views.setdefault(producer, SiteView())
        outside = self._outside.setdefault(producer, [])
        begins_to_share = view.others is None and progress.others is not None
        all_move = progress.floor > view.floor or begins_to_share
        if progress.floor > view.floor:
            self._changed[str(producer), FLOOR] = progress.floor
        new = view.apply(progress)
        self._remember(str(producer), progress, view)
        for site in new:  # the sites of a bundle that have a place are before those that share
            if self._shares and site not in self._at_least:
                outside.append(site)
            elif site not in self._at_least:
                self._add(site)
        self._shares = self._shares or begins_to_share
        if self._shares and OTHERS not in self._at_least:
            self._add(OTHERS)
        for place in list(self._at_least) if all_move else self._moved_by(view, progress):
            self._move(place)

    def _moved_by(self, view: SiteView, progress: SiteProgress) -> list[str]:
        """Return the places whose watermark a bundle may have moved."""
        places = [site for site in progress.sites if site in self._at_least]
        if self._shares:
            places.append(OTHERS)
        if progress.others is not None:
            places += [site for site in self._at_least if site not in view.sites]
        return places

    def _add(self, place: str) -> None:
        self._at_least[place] = INSTANT_MIN
        self._changed[PLACES, place] = INSTANT_MIN

    def _move(self, place: str) -> None:
        before, now = self.reached.get(place, INSTANT_MIN), self._watermark(place)
        if now < before:  # another producer has heard of it, and is behind
            self._at_least[place] = self._changed[PLACES, place] = before
        elif now > before:
            self.before.setdefault(place, before)
            self.reached[place] = now

    def _watermark(self, place: str) -> Instant:
        said = (self._view_watermark(producer, view, place) for producer, view in self._views.items())
        known = (watermark for watermark in said if watermark is not None)
        return Instant(max(min(known, default=INSTANT_MIN), self._at_least.get(place, INSTANT_MIN)))

    def _view_watermark(self, producer: int, view: SiteView, place: str) -> Instant | None:
        """Return what a producer says of a place; None if it has not heard of it."""
        if place != OTHERS:
            return view.watermark_of(place)
        known = [view.sites[site] for site in self._outside.get(producer, ())]
        if view.others is not None:
            known.append(view.others)
        return Instant(max(min(known), view.floor)) if known else None

    def _remember(self, namespace: str, progress: SiteProgress, view: SiteView) -> None:
        for site in progress.sites:
            self._changed[namespace, site] = view.sites[site]
        if progress.others is not None and view.others is not None:
            self._changed[namespace, OTHERS] = view.others

    def take_entries(self) -> Sequence[Entries]:
        """Return what has changed since the last write, and mark it written."""
        found: dict[str, Entries] = {}
        for (namespace, subkey), watermark in sorted(self._changed.items()):
            if namespace not in found:
                found[namespace] = Entries(Kind.SITE, namespace)
            found[namespace].add(NO_KEY, 0, subkey, b"%d" % watermark)
        self._changed.clear()
        return list(found.values())

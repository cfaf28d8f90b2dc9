"""Watermarks by site: what a source says of the sites in its records, and what a consumer makes of several sources.

A *site* is a value of the field that `EventTime(watermark_by=…)` names. Its watermark bounds the event times that are
still to come from it. A site is written as JSON text, as keys are (`keys.key_text`).

    SiteProgress   what one bundle of a source adds: the new watermarks of the sites that it has moved
    SiteView       all that a source has said of its sites up to a position; consumers keep one for each producer

Progress belongs to a position (producer, seq), as the watermark of an interval does (I5), so it travels with the
records of the bundle: in memory, and in segments. It only moves forward, so what is applied twice has the effect of
once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from millpy.model.time import INSTANT_MIN, Instant

FLOOR, OTHERS = "floor", "others"
"""Subkeys of the stored entries that are not those of a site: the text of a site is a JSON string, number or boolean,
none of which is one of these."""


class SiteProgress(msgspec.Struct, array_like=True):
    """The watermarks, in µs, that one bundle of a source has moved, and those of the sites of its records.

    Attributes:
        floor: the watermark that holds for every site: what the source itself has stated; INSTANT_MAX at its end.
        others: the watermark that the sites beyond the bound share; None as long as there are none.
        sites: site -> watermark.
    """

    floor: int = INSTANT_MIN
    others: int | None = None
    sites: dict[str, int] = {}

    def encode(self) -> bytes:
        """Return it as bytes of a slice."""
        return msgspec.json.encode(self)


def decode_progress(encoded: bytes | memoryview) -> SiteProgress:
    """Return what `SiteProgress.encode` has encoded.

    Raises:
        ValueError: it is none.
    """
    try:
        return msgspec.json.decode(encoded, type=SiteProgress)
    except msgspec.DecodeError as error:
        raise ValueError(f"no progress of sites: {error}") from error


@dataclass(slots=True)
class SiteView:
    """What a source has said of its sites, up to a position.

    Attributes:
        floor, others, sites: as in `SiteProgress`; `sites` has all sites that have been heard of.
    """

    floor: int = INSTANT_MIN
    others: int | None = None
    sites: dict[str, int] = field(default_factory=dict)

    def apply(self, progress: SiteProgress) -> list[str]:
        """Move on by the progress of the next bundle. Return the sites that are new."""
        self.floor = max(self.floor, progress.floor)
        if progress.others is not None:
            self.others = progress.others if self.others is None else max(self.others, progress.others)
        new = []
        for site, watermark in progress.sites.items():
            before = self.sites.get(site)
            if before is None:
                new.append(site)
            if before is None or watermark > before:
                self.sites[site] = watermark
        return new

    def watermark_of(self, site: str) -> Instant | None:
        """Return the watermark of a site; None if the source has not heard of it, and so cannot hold it back."""
        known = self.sites.get(site, self.others)
        return None if known is None else Instant(max(known, self.floor))

"""Decoding of stored entries: cells, timers, holds and open windows of a step, by key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, cast

from millpy.computation import Computation
from millpy.model.checkpoint import Entries, Kind
from millpy.model.keys import Key, key_from_text
from millpy.model.time import Instant, nearest_datetime
from millpy.model.timer import TimeDomain, Timer, decode_timer
from millpy.operators.state import store_of
from millpy.testing.kit.contents import OpenWindow

KeyTypes = tuple[type, ...]


def cells_of(entries: Iterable[Entries], computation: Computation, key_types: KeyTypes) -> dict[Key, dict[str, Any]]:
    """Return the stored cells by key and name. A cell that has its default is not stored."""
    cells = computation.cells()
    stores = {name: store_of(name, cell) for name, cell in cells.items()}
    for name, key, subkey, value, _ in _rows(entries, Kind.STATE, key_types):
        if name in stores:
            stores[name].absorb(key, subkey, value)
    found: dict[Key, dict[str, Any]] = {}
    for name, store in stores.items():
        for key in list(store.keys()):
            value = store.load(key)
            found.setdefault(key, {})[name] = dict(value) if cells[name].in_place else value
    return found


def timers_of(entries: Iterable[Entries], key_types: KeyTypes) -> dict[Key, list[Timer]]:
    """Return the timers that are set, by key, in order of their times."""
    found: dict[Key, list[Timer]] = {}
    for domain, key, name, value, at in _rows(entries, Kind.TIMER, key_types):
        if domain != "hold":
            found.setdefault(key, []).append(decode_timer(cast("TimeDomain", domain), name, at, value))
    return {key: sorted(timers, key=lambda timer: (timer.at_us, timer.name)) for key, timers in found.items()}


def holds_of(entries: Iterable[Entries], key_types: KeyTypes) -> dict[Key, dict[str, datetime]]:
    """Return the holds of the watermark by key and name, without those of timers and windows."""
    found: dict[Key, dict[str, datetime]] = {}
    for domain, key, name, _, at in _rows(entries, Kind.TIMER, key_types):
        if domain == "hold":
            found.setdefault(key, {})[name] = nearest_datetime(at)
    return found


def windows_of(entries: Iterable[Entries], key_types: KeyTypes) -> list[OpenWindow]:
    """Return the windows in the state, in order of start and key."""
    found = []
    for _, key, subkey, _, _ in _rows(entries, Kind.WINDOW, key_types):
        start, _, end = subkey.partition("/")
        found.append((int(start), int(end), key))
    found.sort(key=lambda window: (window[0], window[1], repr(window[2])))
    return [OpenWindow(key, (nearest_datetime(start), nearest_datetime(end))) for start, end, key in found]


def _rows(
    entries: Iterable[Entries], kind: Kind, key_types: KeyTypes
) -> Iterator[tuple[str, Key, str, bytes, Instant]]:
    """Yield (namespace, key, subkey, value, fire time) of the entries of a kind."""
    for part in entries:
        if part.kind is not kind:
            continue
        for text, subkey, value, at in zip(part.keys, part.subkeys, part.values, part.fire_ats, strict=True):
            if value is not None:
                yield part.namespace, key_from_text(text, key_types), subkey, value, Instant(at)

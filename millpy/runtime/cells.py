"""Cell stores: the values of one cell for the keys of one interval, as JSON text.

Encoded text is the state; objects live only while their key is stepped. So what a step sees is what another worker
would read from the store, a key's changes are undone by forgetting its objects, and 100,000 keys cost the garbage
collector nothing. A value is checked by decoding it again before it is taken: what is stored can always be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from millpy.computation import NO_DEFAULT, Cell, MapCell, Value
from millpy.errors import RefusedValueError, SchemaError
from millpy.model.checkpoint import Entries, Kind
from millpy.model.delta import encode_value
from millpy.model.deployment import Meaning
from millpy.model.identity import json_text, type_text
from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX

ENTRY_BYTES = 160
"""What a value costs in memory beside its text."""

NULL = b"null"
Change = tuple[str, bytes | None]


class ValueStore:
    """A `Value` or `ListCell` of all keys in memory.

    Attributes:
        encoded: key -> JSON text; a key that has the default is absent.
        changed: key code of this turn -> new text, or None for a tombstone.
        bytes: estimate of the memory taken.
    """

    def __init__(self, name: str, cell: Cell[Any]) -> None:
        self.name = name
        self.encoded: dict[Key, bytes] = {}
        self.changed: dict[int, bytes | None] = {}
        self.bytes = 0
        default = _default_of(cell)
        self.default = encode_value(default)
        shape = cell.shape()
        self.decode = msgspec.json.Decoder(shape if default is not None else shape | None).decode
        self._decode_default = (lambda _: None) if default is None else self.decode

    def load(self, key: Key) -> Any:
        """A fresh object of the key's value."""
        text = self.encoded.get(key)
        return self._decode_default(self.default) if text is None else self.decode(text)

    def blank(self, key: Key) -> Any:
        """A fresh object of the default."""
        return self._decode_default(self.default)

    def settled(self, value: Any) -> Any:
        """The value as the next bundle would read it.

        Raises:
            RefusedValueError: it cannot be stored, or is not of the cell's type.
        """
        text = encode_value(value)
        try:
            return self.decode(text)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._not_of_type(error) from error

    def changes(self, key: Key, value: Any) -> bytes:
        """What `apply` has to be given for this value; changes nothing.

        Raises:
            RefusedValueError: as for `settled`.
        """
        text = encode_value(value)
        try:
            self.decode(text)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._not_of_type(error) from error
        return text

    def apply(self, key: Key, code: int, text: bytes) -> None:
        """Make `text` the key's value."""
        before = self.encoded.get(key)
        if text == before:
            return
        if text != self.default:
            self.encoded[key] = self.changed[code] = text
            self.bytes += len(text) - len(before) if before is not None else len(text) + ENTRY_BYTES
        elif before is not None:
            del self.encoded[key]
            self.changed[code] = None
            self.bytes -= len(before) + ENTRY_BYTES

    def take(self, key: Key, code: int, value: Any) -> None:
        """`changes` and `apply` at once: a key with one cell in hand cannot be left half taken."""
        self.apply(key, code, self.changes(key, value))

    def _not_of_type(self, error: Exception) -> RefusedValueError:
        return RefusedValueError(f"the value of cell {self.name!r} is not of its type: {error}")

    def absorb(self, key: Key, subkey: str, text: bytes) -> None:
        """Take a stored value, written as this version would write it."""
        self.evict(key)
        try:
            text = encode_value(self.decode(text))
        except (msgspec.DecodeError, ValueError):
            pass  # left as it is: whoever reads it is told, and its record is quarantined
        self.encoded[key] = text
        self.bytes += len(text) + ENTRY_BYTES

    def evict(self, key: Key) -> None:
        """Forget a key's value, which is stored."""
        text = self.encoded.pop(key, None)
        if text is not None:
            self.bytes -= len(text) + ENTRY_BYTES

    def keys(self) -> Iterable[Key]:
        """Keys with a value in memory."""
        return self.encoded

    def take_entries(self, texts: Sequence[bytes], hashes: Sequence[int]) -> Entries | None:
        """This turn's changes, by the key texts and hashes of its codes; None for none."""
        changed, self.changed = self.changed, {}
        if not changed:
            return None
        count = len(changed)
        return Entries(
            Kind.STATE,
            self.name,
            keys=[texts[code] for code in changed],
            key_hashes=[hashes[code] for code in changed],
            subkeys=[""] * count,
            values=list(changed.values()),
            fire_ats=[INSTANT_MAX] * count,
        )


class MapStore:
    """A `MapCell` of all keys in memory, by entry."""

    def __init__(self, name: str, cell: MapCell[Any, Any]) -> None:
        self.name = name
        self.encoded: dict[Key, dict[str, bytes]] = {}
        self.changed: dict[int, dict[str, bytes | None]] = {}
        self.bytes = 0
        self.decode = msgspec.json.Decoder(cell.value_type).decode
        self.decode_key = msgspec.json.Decoder(cell.key_type).decode

    def load(self, key: Key) -> Any:
        """A view of the key's entries."""
        return MapView(self, self.encoded.get(key, {}))

    def blank(self, key: Key) -> Any:
        """A view without entries."""
        view = MapView(self, self.encoded.get(key, {}))
        view.clear()
        return view

    def settled(self, view: MapView) -> MapView:
        """The view, its entries as the next bundle would read them."""
        view.settle()
        return view

    def changes(self, key: Key, view: MapView) -> list[Change]:
        """What `apply` has to be given for this view; changes nothing."""
        return view.changes()

    def apply(self, key: Key, code: int, changes: Sequence[Change]) -> None:
        """Make these changes to the key's entries."""
        if not changes:
            return
        entries = self.encoded.setdefault(key, {})
        changed = self.changed.setdefault(code, {})
        for subkey, text in changes:
            before = entries.pop(subkey, None)
            if before is not None:
                self.bytes -= len(subkey) + len(before) + ENTRY_BYTES
            if text is not None:
                entries[subkey] = text
                self.bytes += len(subkey) + len(text) + ENTRY_BYTES
            changed[subkey] = text
        if not entries:
            del self.encoded[key]

    def take(self, key: Key, code: int, view: MapView) -> None:
        """`changes` and `apply` at once."""
        self.apply(key, code, view.changes())

    def absorb(self, key: Key, subkey: str, text: bytes) -> None:
        """Take a stored entry, written as this version would write it."""
        try:
            text = encode_value(self.decode(text))
        except (msgspec.DecodeError, ValueError):
            pass  # as for ValueStore
        self.encoded.setdefault(key, {})[subkey] = text
        self.bytes += len(subkey) + len(text) + ENTRY_BYTES

    def evict(self, key: Key) -> None:
        """Forget a key's entries, which are stored."""
        entries = self.encoded.pop(key, {})
        self.bytes -= sum(len(subkey) + len(text) + ENTRY_BYTES for subkey, text in entries.items())

    def keys(self) -> Iterable[Key]:
        """Keys with an entry in memory."""
        return self.encoded

    def take_entries(self, texts: Sequence[bytes], hashes: Sequence[int]) -> Entries | None:
        """This turn's changes; None for none."""
        changed, self.changed = self.changed, {}
        if not changed:
            return None
        entries = Entries(Kind.STATE, self.name)
        for code, changes in changed.items():
            for subkey, text in changes.items():
                entries.add(texts[code], hashes[code], subkey, text)
        return entries


Store = ValueStore | MapStore


class MapView(MutableMapping[Any, Any]):
    """One key's entries while it is stepped: decoded on touch, and encoded again after each record.

    `_live` has what the record in hand has touched, `_changed` what earlier ones of this step have left.
    """

    def __init__(self, store: MapStore, encoded: Mapping[str, bytes]) -> None:
        self._store = store
        self._encoded = encoded
        self._changed: dict[str, bytes | None] = {}
        self._live: dict[str, Any] = {}

    def __getitem__(self, name: Any) -> Any:
        subkey = self._subkey(name)
        if subkey in self._live:
            return self._live[subkey]
        text = self._text(subkey)
        if text is None:
            raise KeyError(name)
        value = self._live[subkey] = self._store.decode(text)
        return value

    def __setitem__(self, name: Any, value: Any) -> None:
        self._live[self._subkey(name)] = value

    def __delitem__(self, name: Any) -> None:
        subkey = self._subkey(name)
        if subkey not in self._live and self._text(subkey) is None:
            raise KeyError(name)
        self._live.pop(subkey, None)
        self._changed[subkey] = None

    def __contains__(self, name: object) -> bool:
        subkey = self._subkey(name)
        return subkey in self._live or self._text(subkey) is not None

    def __iter__(self) -> Iterator[Any]:
        # Sorted: the order of entries in memory depends on where they have been loaded from.
        for subkey in sorted(self._subkeys()):
            yield self._store.decode_key(subkey)

    def __len__(self) -> int:
        return len(self._subkeys())

    def __repr__(self) -> str:
        return repr(dict(self))

    def settle(self) -> None:
        """Encode what is live.

        Raises:
            RefusedValueError: an entry cannot be stored, or is not of the cell's type.
        """
        for subkey, value in self._live.items():
            text = encode_value(value)
            if text == self._text(subkey):
                continue
            try:
                self._store.decode(text)
            except (msgspec.DecodeError, ValueError) as error:
                raise RefusedValueError(f"an entry of cell {self._store.name!r} is not of its type: {error}") from error
            self._changed[subkey] = text
        self._live.clear()

    def changes(self) -> list[Change]:
        """Entries that are not what they were before the step; None for those deleted."""
        self.settle()
        return [(subkey, text) for subkey, text in self._changed.items() if text != self._encoded.get(subkey)]

    def _text(self, subkey: str) -> bytes | None:
        return self._changed[subkey] if subkey in self._changed else self._encoded.get(subkey)

    def _subkeys(self) -> set[str]:
        gone = {subkey for subkey, text in self._changed.items() if text is None}
        return ((self._encoded.keys() | self._changed.keys()) - gone) | self._live.keys()

    def _subkey(self, name: Any) -> str:
        text = encode_value(name)
        try:
            key = self._store.decode_key(text)
        except (msgspec.DecodeError, ValueError) as error:
            raise RefusedValueError(f"{name!r} is no key of cell {self._store.name!r}: {error}") from error
        # Keys that are equal are one entry: 1 and 1.0 where keys are floats, one instant in two time zones.
        if type(key) is float:
            text = encode_value(key)
        elif type(key) is datetime and key.tzinfo is not None:
            text = encode_value(key.astimezone(UTC))
        return text.decode()


def store_of(name: str, cell: Cell[Any]) -> Store:
    """An empty store for a cell.

    Raises:
        SchemaError: the cell's type or default cannot be stored as JSON, or the default is not the same each time.
    """
    types = (cell.key_type, cell.value_type) if isinstance(cell, MapCell) else (getattr(cell, "type"),)  # noqa: B009
    for type_ in types:
        if isinstance(msgspec.inspect.type_info(type_), msgspec.inspect.CustomType):
            raise SchemaError(f"cell {name!r} cannot be stored: {type_!r} has no JSON form", hint="use a Struct")
    try:
        store = MapStore(name, cell) if isinstance(cell, MapCell) else ValueStore(name, cell)
        if isinstance(store, ValueStore) and encode_value(_default_of(cell)) != store.default:
            raise SchemaError(
                f"cell {name!r} has another default each time it is made, so no two workers would agree on it",
                hint="give it a default=, and set what differs when a key has its first record",
            )
        return store
    except (TypeError, RefusedValueError) as error:
        raise SchemaError(f"cell {name!r} cannot be stored: {error}") from error


def _default_of(cell: Cell[Any]) -> Any:
    if not isinstance(cell, Value):
        return []
    if cell.default is not NO_DEFAULT:
        return cell.default
    if isinstance(cell.type, type) and issubclass(cell.type, msgspec.Struct):
        required = [f for f in msgspec.structs.fields(cell.type) if f.required]
        return None if required else cell.type()
    return None


def meaning_of(cells: Mapping[str, Cell[Any]]) -> Meaning:
    """The cells as text, with the shapes of their types and their defaults, which stored state leaves out."""
    return {"cells": [(name, _described(cell)) for name, cell in cells.items()]}


def _described(cell: Cell[Any]) -> str:
    default = _default_of(cell) if isinstance(cell, Value) else None
    told = "" if default is None else f", default={json_text(default)}"
    return f"{type(cell).__name__}({type_text(cell.shape())}{told})"

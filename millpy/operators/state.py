"""Cell stores: the values of one cell for the keys of one interval, as JSON text.

The encoded text is the state; objects live only while their key is stepped. So a step sees the same values that another
worker would read from the store, a key's changes are undone by forgetting its objects, and 100,000 keys cost the
garbage collector nothing. A value is decoded again before it is taken, so every stored value can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from millpy.computation import NO_DEFAULT, Cell, ListCell, MapCell, Value
from millpy.errors import RefusedValueError, SchemaError
from millpy.model.checkpoint import Entries, Kind
from millpy.model.delta import encode_value
from millpy.model.field_types import decimal_of, decimal_problem, units_of
from millpy.model.identity import Identity, canonical_json, identity_of_type
from millpy.model.keys import Key
from millpy.model.time import INSTANT_MAX

ENTRY_BYTES = 160
"""Estimate of the memory that a value takes in addition to its text."""

NULL = b"null"
PLAIN_KEYS = (str, int)
"""Types of keys of which equal ones have one text."""
Change = tuple[str, bytes | None]


class ValueStore:
    """A `Value` or `ListCell` of all keys in memory.

    Attributes:
        encoded: key -> JSON text; a key with the default is absent.
        changed: key code of this turn -> new text, or None for a tombstone.
        bytes: estimate of the memory in use.
    """

    def __init__(self, name: str, cell: Cell[Any]) -> None:
        self.name = name
        self.encoded: dict[Key, bytes] = {}
        self.changed: dict[int, bytes | None] = {}
        self.bytes = 0
        default = _default_of(cell)
        self.default = encode_value(default)
        shape = cell.stored_type()
        self.decode = msgspec.json.Decoder(shape if default is not None else shape | None).decode
        self._decode_default = (lambda _: None) if default is None else self.decode

    def load(self, key: Key) -> Any:
        """Return a fresh object of the key's value."""
        text = self.encoded.get(key)
        return self._decode_default(self.default) if text is None else self.decode(text)

    def blank(self, key: Key) -> Any:
        """Return a fresh object of the default."""
        return self._decode_default(self.default)

    def reencode(self, value: Any) -> Any:
        """Return the value as the next bundle would read it.

        Raises:
            RefusedValueError: the value cannot be stored, or is not of the cell's type.
        """
        text = encode_value(value)
        try:
            return self.decode(text)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._not_of_type(error) from error

    def changes(self, key: Key, value: Any) -> bytes:
        """Return the argument of `apply` for this value, without changing anything.

        Raises:
            RefusedValueError: as for `reencode`.
        """
        text = encode_value(value)
        try:
            self.decode(text)
        except (msgspec.DecodeError, ValueError) as error:
            raise self._not_of_type(error) from error
        return text

    def apply(self, key: Key, code: int, text: bytes) -> None:
        """Make `text` the value of a key, whose code in this turn is `code`."""
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
        """Call `changes` and `apply` at once; safe when only one cell of the key has changed."""
        self.apply(key, code, self.changes(key, value))

    def _not_of_type(self, error: Exception) -> RefusedValueError:
        return RefusedValueError(f"the value of cell {self.name!r} is not of its type: {error}")

    def absorb(self, key: Key, subkey: str, text: bytes) -> None:
        """Load a stored value, re-encoded as this version would write it."""
        self.evict(key)
        try:
            text = encode_value(self.decode(text))
        except (msgspec.DecodeError, ValueError):
            pass  # kept unchanged: reading it raises, and the record that reads it is dead-lettered
        self.encoded[key] = text
        self.bytes += len(text) + ENTRY_BYTES

    def evict(self, key: Key) -> None:
        """Evict a key's value from memory; the store has it."""
        text = self.encoded.pop(key, None)
        if text is not None:
            self.bytes -= len(text) + ENTRY_BYTES

    def keys(self) -> Iterable[Key]:
        """Return the keys with a value in memory."""
        return self.encoded

    def take_entries(self, texts: Sequence[bytes], hashes: Sequence[int]) -> Entries | None:
        """Return this turn's changes and forget them; None without changes. Key texts and hashes are by code."""
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
        """Return a view of the key's entries."""
        return MapView(self, self.encoded.get(key, {}))

    def blank(self, key: Key) -> Any:
        """Return a view without entries."""
        view = MapView(self, self.encoded.get(key, {}))
        view.clear()
        return view

    def reencode(self, view: MapView) -> MapView:
        """Return the view, with its entries as the next bundle would read them."""
        view.reencode()
        return view

    def changes(self, key: Key, view: MapView) -> list[Change]:
        """Return the argument of `apply` for this view, without changing the store."""
        return view.changes()

    def apply(self, key: Key, code: int, changes: Sequence[Change]) -> None:
        """Apply changes to the key's entries."""
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
        """Call `changes` and `apply` at once."""
        self.apply(key, code, view.changes())

    def absorb(self, key: Key, subkey: str, text: bytes) -> None:
        """Load a stored entry, re-encoded as this version would write it."""
        try:
            text = encode_value(self.decode(text))
        except (msgspec.DecodeError, ValueError):
            pass  # as for ValueStore
        self.encoded.setdefault(key, {})[subkey] = text
        self.bytes += len(subkey) + len(text) + ENTRY_BYTES

    def evict(self, key: Key) -> None:
        """Evict a key's entries from memory; the store has them."""
        entries = self.encoded.pop(key, {})
        self.bytes -= sum(len(subkey) + len(text) + ENTRY_BYTES for subkey, text in entries.items())

    def keys(self) -> Iterable[Key]:
        """Return the keys with an entry in memory."""
        return self.encoded

    def size(self) -> int:
        """Return the number of entries in memory."""
        return sum(map(len, self.encoded.values()))

    def take_entries(self, texts: Sequence[bytes], hashes: Sequence[int]) -> Entries | None:
        """Return this turn's changes and forget them; None without changes. Key texts and hashes are by code."""
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
    """One key's entries as callbacks see them: decoded on first access, and encoded again after each record.

    `_live` has the entries that the current record has accessed, `_changed` the changes of earlier records of the step.
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
        # Sorted, because the order of entries in memory depends on how they were loaded.
        for subkey in sorted(self._subkeys()):
            yield self._store.decode_key(subkey)

    def __len__(self) -> int:
        return len(self._subkeys())

    def __repr__(self) -> str:
        return repr(dict(self))

    def reencode(self) -> None:
        """Encode the accessed entries.

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
        """Return the entries that the step has changed; None for deleted ones."""
        self.reencode()
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
            raise RefusedValueError(f"{name!r} is not a key of cell {self._store.name!r}: {error}") from error
        if type(key) not in PLAIN_KEYS:
            text = encode_value(_canonical(key))
        return text.decode()


def _canonical(key: Any) -> Any:
    """Return the one of equal keys that is stored: an instant in UTC, a Decimal without zeros at its end."""
    if isinstance(key, tuple):
        return tuple(map(_canonical, key))
    if isinstance(key, datetime) and key.tzinfo is not None:
        return key.astimezone(UTC)
    if isinstance(key, Decimal):
        if problem := decimal_problem(key):
            raise RefusedValueError(f"a Decimal as the key of an entry: {problem}")
        return decimal_of(units_of(key))
    return key


def store_of(name: str, cell: Cell[Any]) -> Store:
    """Make an empty store for a cell.

    Raises:
        SchemaError: the cell's type or default cannot be stored as JSON, or the default differs each time.
    """
    types = (cell.key_type, cell.value_type) if isinstance(cell, MapCell) else (getattr(cell, "type"),)  # noqa: B009
    try:
        for type_ in types:
            if isinstance(msgspec.inspect.type_info(type_), msgspec.inspect.CustomType):
                raise SchemaError(f"cell {name!r} cannot be stored: {type_!r} has no JSON form", hint="use a Struct")
        store = MapStore(name, cell) if isinstance(cell, MapCell) else ValueStore(name, cell)
        if isinstance(store, ValueStore) and encode_value(_default_of(cell)) != store.default:
            raise SchemaError(
                f"the default of cell {name!r} differs each time it is made, so two workers would not agree on it",
                hint="give the cell a default= and set the differing part at a key's first record",
            )
        return store
    except (TypeError, RefusedValueError) as error:
        hint = "for example Value(float, default=0.0), ListCell(str), MapCell(str, int)"
        raise SchemaError(f"cell {name!r} cannot be stored: {error}", hint=hint) from error


def _default_of(cell: Cell[Any]) -> Any:
    if not isinstance(cell, Value):
        return []
    if cell.default is not NO_DEFAULT:
        return cell.default
    if isinstance(cell.type, type) and issubclass(cell.type, msgspec.Struct):
        required = [f for f in msgspec.structs.fields(cell.type) if f.required]
        return None if required else cell.type()
    return None


def identity_of_cell(cell: Cell[Any]) -> Identity:
    """Describe a cell: the shape of its type, and its default, which stored state leaves out."""
    if isinstance(cell, MapCell):
        return {"kind": "map", "keys": identity_of_type(cell.key_type), "values": identity_of_type(cell.value_type)}
    if isinstance(cell, ListCell):
        return {"kind": "list", "items": identity_of_type(cell.type)}
    assert isinstance(cell, Value), cell
    default = _default_of(cell)
    described = None if default is None else {"json": canonical_json(default).decode()}
    return {"kind": "value", "type": identity_of_type(cell.type), "default": described}

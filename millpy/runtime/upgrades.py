"""State upgrades: stored cells of a computation, key by key, through a function of the user into cells of new types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millpy.computation import Cell
from millpy.errors import GraphError, RefusedValueError
from millpy.model.deployment import StateRow
from millpy.runtime.cells import MapStore, store_of

_ANY = ""  # the stores are empty: they only know how cells are written
StateFunction = Callable[[dict[str, Any]], Mapping[str, Any]]


class StateUpgrade:
    """What `Graph.upgrade` was given, for the cells of the new version.

    Args:
        computation: its name.
        cells: of the new version.
        function: from the stored cells of a key, as plain data by name, to what the cells are to hold.
    """

    def __init__(self, computation: str, cells: Mapping[str, Cell[Any]], function: StateFunction) -> None:
        self._computation = computation
        self._stores = {name: store_of(name, cell) for name, cell in cells.items()}
        self._function = function

    def __call__(self, key: bytes, rows: Sequence[StateRow]) -> list[StateRow]:
        """The rows of one key as they are to be stored; a cell that has its default has none.

        Raises:
            GraphError: the function raises, or names a cell or value that the new version does not have.
        """
        try:
            made = dict(self._function(_plain(rows)))
            return [row for name, value in made.items() for row in self._encoded(name, value)]
        except Exception as error:
            raise GraphError(
                f"the upgrade of {self._computation!r} fails for key {key.decode()}: {type(error).__name__}: {error}",
                hint="nothing was changed; correct the function that is given to graph.upgrade(…)",
            ) from error

    def _encoded(self, name: str, value: Any) -> list[StateRow]:
        store = self._stores.get(name)
        if store is None:
            raise RefusedValueError(f"there is no cell {name!r}")
        if isinstance(store, MapStore):
            view = store.blank(_ANY)
            view.update(value)
            return [(name, subkey, text) for subkey, text in store.changes(_ANY, view) if text is not None]
        text = store.changes(_ANY, value)
        return [] if text == store.default else [(name, "", text)]


def _plain(rows: Sequence[StateRow]) -> dict[str, Any]:
    """Cells by name; entries of a MapCell by their keys, of which lists are tuples."""
    found: dict[str, Any] = {}
    for name, subkey, text in rows:
        value = msgspec.json.decode(text)
        if subkey:
            entry = msgspec.json.decode(subkey)
            found.setdefault(name, {})[tuple(entry) if isinstance(entry, list) else entry] = value
        else:
            found[name] = value
    return found

"""State upgrades: a user's function converts the stored cells of a computation to new types, key by key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millpy.computation import Cell
from millpy.errors import GraphError, RefusedValueError
from millpy.model.dead_letter import error_text
from millpy.model.deployment import StateRow
from millpy.model.step_progress import is_user_error
from millpy.operators.state import MapStore, store_of

_ANY = ""  # any key will do: the stores are empty and only encode cells
StateFunction = Callable[[dict[str, Any]], Mapping[str, Any]]


class StateUpgrade:
    """The function given to `Graph.upgrade`, with the cells of the new version.

    Args:
        computation: name of the computation.
        cells: cells of the new version.
        function: maps the stored cells of a key (plain data by name) to the values of the new cells.
    """

    def __init__(self, computation: str, cells: Mapping[str, Cell[Any]], function: StateFunction) -> None:
        self._computation = computation
        self._stores = {name: store_of(name, cell) for name, cell in cells.items()}
        self._function = function

    def __call__(self, key: bytes, rows: Sequence[StateRow]) -> list[StateRow]:
        """Return the new rows of one key; a cell with its default has none.

        Raises:
            GraphError: the function raises, or returns a cell or value that the new version does not have.
        """
        try:
            made = dict(self._function(_plain(rows)))
            return [row for name, value in made.items() for row in self._encoded(name, value)]
        except BaseException as error:  # user code
            if not is_user_error(error):
                raise
            raise GraphError(
                f"the upgrade of {self._computation!r} fails for key {key.decode()}: {error_text(error)}",
                hint="nothing was changed; correct the function given to graph.upgrade(…)",
            ) from error

    def _encoded(self, name: str, value: Any) -> list[StateRow]:
        store = self._stores.get(name)
        if store is None:
            raise RefusedValueError(f"the new version has no cell {name!r}")
        if isinstance(store, MapStore):
            view = store.blank(_ANY)
            view.update(value)
            return [(name, subkey, text) for subkey, text in store.changes(_ANY, view) if text is not None]
        text = store.changes(_ANY, value)
        return [] if text == store.default else [(name, "", text)]


def _plain(rows: Sequence[StateRow]) -> dict[str, Any]:
    """Return cells by name; entries of a MapCell by key, with keys that are lists as tuples."""
    found: dict[str, Any] = {}
    for name, subkey, text in rows:
        value = msgspec.json.decode(text)
        if subkey:
            entry = msgspec.json.decode(subkey)
            found.setdefault(name, {})[tuple(entry) if isinstance(entry, list) else entry] = value
        else:
            found[name] = value
    return found

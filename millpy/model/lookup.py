"""Lookup tables: ordinary SQL tables whose rows enrich records or are rules, and the versions of them in memory.

    LookupTable    which table, the class of its rows, its key, and how often it is read again
    TableVersion   all its rows as they were at one moment; immutable

A worker reads its tables in the background, and gives the newest versions to each turn. All records of a turn see one
version of a table, also when the turn is stepped again to find a refused value. The commit has the number of the
version. A turn that a crash has lost may see a newer version when it is stepped again: nothing of it was committed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from millpy.errors import GraphError, TableLoadError
from millpy.limits import NAME_BYTES_MAX
from millpy.model.arguments import are_texts
from millpy.model.keys import Key, KeyHasher
from millpy.model.record import Records, RecordType
from millpy.model.time import check_length

REFRESH_MIN = timedelta(milliseconds=100)
PUBLIC = "public"


class LookupTable:
    """An ordinary SQL table, or view, of the same database, as the rows that a graph looks up.

    Two of them are equal if all arguments are.

    Args:
        name: the table, with its schema: "registry.devices"; without one, in schema public.
        row: the class of a row; its fields are the columns that are read. A row that does not fit is left out, and
            counted.
        key: the field or fields by which a row is found; no two rows of the table may have the same.
        refresh: how long after a read the next one begins.

    Raises:
        GraphError: the name is none of a table, or `refresh` is below 0.1 s.
        SchemaError: a type cannot be carried, or a field of the key does not exist or may be None.
    """

    def __init__(self, name: str, row: type[msgspec.Struct], *, key: str | Sequence[str], refresh: timedelta) -> None:
        parts = name.split(".") if isinstance(name, str) else []
        if not 1 <= len(parts) <= 2 or not all(0 < len(p.encode()) <= NAME_BYTES_MAX and "\0" not in p for p in parts):
            raise GraphError(f"{name!r} is not the name of a table", hint='for example "devices" or "registry.devices"')
        if not isinstance(refresh, timedelta) or refresh < REFRESH_MIN:
            raise GraphError(f"refresh={refresh!r} is not a duration of 0.1 s or more", hint="for example seconds(30)")
        check_length("refresh", refresh)
        self.schema, self.table = parts if len(parts) == 2 else (PUBLIC, parts[0])
        if not isinstance(key, str) and not are_texts(key):
            raise GraphError(f"key takes names of fields, not {key!r}", hint='for example key="device"')
        self.row = row
        self.record_type = RecordType(row)
        self.key = (key,) if isinstance(key, str) else tuple(key)
        if not self.key:
            raise GraphError(f"lookup table {name!r} has no key", hint='name its field or fields: key="device"')
        self.key_types = self.record_type.key_types(self.key)
        self.refresh = refresh

    @property
    def name(self) -> str:
        """The table's name with its schema."""
        return f"{self.schema}.{self.table}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LookupTable) and self._parts() == other._parts()

    def __hash__(self) -> int:
        return hash(self._parts())

    def __repr__(self) -> str:
        key = self.key[0] if len(self.key) == 1 else self.key
        return f"LookupTable({self.name!r}, {self.row.__name__}, key={key!r}, refresh={self.refresh!r})"

    def _parts(self) -> tuple[Any, ...]:
        return self.schema, self.table, self.row, self.key, self.refresh


class TableRows(Mapping[Any, Any]):
    """The rows of one version of a table, by key, in the order of their keys in the database; all calls share them.

    Attributes:
        version: identifies the contents: equal texts are equal rows.
    """

    def __init__(self, version: str, index: Mapping[Key, int], objects: Sequence[Any]) -> None:
        self.version = version
        self._index = index
        self._objects = objects

    def __getitem__(self, key: Any) -> Any:
        return self._objects[self._index[key]]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


@dataclass(frozen=True)
class TableVersion:
    """All rows of a table as one read found them.

    Attributes:
        version: identifies the contents: equal texts are equal rows, in all workers.
        loaded_at_us: when it was read, in µs of the database's clock.
        batch: the rows that fit, in the order in which they were read.
        size: bytes of all rows as JSON text.
        misfits: number of rows that do not fit the class, and are treated as missing.
        misfit: why the first of them does not fit; "" without any.
    """

    table: LookupTable
    version: str
    loaded_at_us: int
    batch: pa.RecordBatch
    size: int
    misfits: int = 0
    misfit: str = ""

    @property
    def rows(self) -> int:
        """Number of rows that can be found."""
        return int(self.batch.num_rows)

    @cached_property
    def index(self) -> dict[Key, int]:
        """Key -> its row in `batch`.

        Raises:
            TableLoadError: two rows have the same key.
        """
        records = Records(self.table.record_type, np.zeros(self.rows, np.int64), batch=self.batch)
        found = records.keys(self.table.key, KeyHasher())
        if len(found.keys) < self.rows:
            codes, counts = np.unique(found.codes, return_counts=True)
            twice = found.keys[int(codes[np.argmax(counts)])]
            raise TableLoadError(
                f"table {self.table.name} has {int(counts.max())} rows with the key {twice!r}",
                hint=f"make {', '.join(self.table.key)} unique, or look up by other columns",
            )
        keys = found.keys
        return {keys[code]: row for row, code in enumerate(found.codes.tolist())}

    @cached_property
    def objects(self) -> list[Any]:
        """The rows as objects of the table's class."""
        return self.table.record_type.objects_of(self.batch)

    @cached_property
    def by_key(self) -> TableRows:
        """The rows as user code sees them."""
        return TableRows(self.version, self.index, self.objects)

    def described(self) -> dict[str, Any]:
        """Describe the version as a commit stores it."""
        return {"version": self.version, "loaded_at_us": self.loaded_at_us, "rows": self.rows}


Tables = Mapping[LookupTable, TableVersion]
"""The versions that one turn sees."""

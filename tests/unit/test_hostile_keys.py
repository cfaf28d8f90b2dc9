"""Keys and cursors of the API come from anyone who may look: none is a fault of the server."""

from __future__ import annotations

from typing import Any

import pytest

from millpy.admin.pages import decoded
from millpy.admin.state import stored_page
from millpy.errors import UsageError
from millpy.ui.tables import parsed

HOSTILE = ['"\\ud800"', '["a", "\\udfff"]', "[" * 9_000, "1" * 9_000, '{"a": 1e999}', "\ud800"]


class OnePage:
    """Stands for the database: keeps the keys that it is asked for."""

    keys: Any = None

    def ask(self, _: str, **given: Any) -> list[dict[str, Any]]:
        if "keys" not in given:
            return [{"graph": "plant", "computation": "counts", "interval_id": 1}]
        self.keys = given["keys"]
        return []


@pytest.mark.parametrize("key", HOSTILE, ids=range(len(HOSTILE)))
def test_any_text_can_be_asked_for_as_a_key(key: str) -> None:
    database: Any = OnePage()

    page = stored_page(database, "state", "plant", "counts", key, (), 10)

    assert page.rows == []
    assert all(text.encode() for text in database.keys)


@pytest.mark.parametrize("key", HOSTILE, ids=range(len(HOSTILE)))
def test_a_key_in_an_address_is_json_only_if_it_can_be_stored(key: str) -> None:
    assert parsed(key) == key or key.startswith("{")


@pytest.mark.parametrize("cursor", ['["\\ud800"]', '["\\u0000"]', "[" * 9_000, "5", '{"a":1}'])
def test_a_cursor_that_no_page_gives_is_refused(cursor: str) -> None:
    with pytest.raises(UsageError, match="cursor cannot be read"):
        decoded(cursor)

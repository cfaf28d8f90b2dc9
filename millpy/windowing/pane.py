"""Panes: what is remembered of one key's window between bundles, and how it is stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

from millpy.model.keys import Key
from millpy.windowing.fold import Folds


class OpenPane(msgspec.Struct, gc=False, omit_defaults=True):
    """One key's window.

    Attributes:
        values: one accumulator per aggregate; of a slice without records [].
        pane_index: index of the next pane (I7).
        late_count: records that came when the watermark had reached the window's end.
        emitted: whether a pane has left.
        bundle: the bundle that last wrote it; 0 for none.
    """

    values: list[Any]
    pane_index: int = 0
    late_count: int = 0
    emitted: bool = False
    bundle: int = 0


DuePane: TypeAlias = "tuple[int, int, Key, OpenPane]"
"""(window start, window end, key, pane)."""

_encode_lines = msgspec.json.Encoder().encode_lines
_decode = msgspec.json.Decoder(OpenPane).decode


def encode_panes(panes: Sequence[OpenPane], folds: Folds) -> list[bytes]:
    """Panes as JSON, all in one call unless one of them has what JSON cannot say."""
    if not panes:
        return []
    try:
        text = _encode_lines(panes)
    except (OverflowError, TypeError):
        return [_encode_exactly(pane, folds) for pane in panes]
    lines: list[bytes] = text.splitlines()
    if b"null" not in text:
        return lines
    return [_encode_exactly(pane, folds) if b"null" in line else line for pane, line in zip(panes, lines, strict=True)]


def decode_pane(stored: bytes, folds: Folds) -> OpenPane:
    """A stored pane."""
    pane = _decode(stored)
    pane.values = pane.values and folds.restored(pane.values)
    return pane


def _encode_exactly(pane: OpenPane, folds: Folds) -> bytes:
    """With what JSON cannot say in a form that the folds read back."""
    return msgspec.json.encode(msgspec.structs.replace(pane, values=pane.values and folds.stored(pane.values)))

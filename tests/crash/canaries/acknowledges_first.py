"""Canary: acknowledges what a turn has read before it commits the turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millpy.runtime import turn as turns
from millpy.runtime.turn import Turn
from tests.crash.shore_graph import graph

__all__ = ["graph"]

commit = turns.commit


async def acknowledge_and_commit(store: Any, turn: Turn, *arguments: Any) -> None:
    for injector, token in turn.tokens:
        await injector.acknowledge(token)
    await commit(store, replace(turn, tokens=[]), *arguments)


turns.commit = acknowledge_and_commit

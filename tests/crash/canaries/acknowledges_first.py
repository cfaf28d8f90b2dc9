"""Canary: acknowledges what a turn has read before it commits the turn."""

from __future__ import annotations

from dataclasses import replace

from millpy.runtime.turn import Turn, TurnCycle
from millpy.runtime.worker import Worker
from tests.crash.message_graph import graph

__all__ = ["graph"]


class AcknowledgesFirst(TurnCycle):
    async def commit(self, turn: Turn, stepped: tuple[float, float]) -> None:
        for injector, token in turn.tokens:
            await injector.acknowledge(token)
        await super().commit(replace(turn, tokens=[]), stepped)


Worker.cycle_type = AcknowledgesFirst

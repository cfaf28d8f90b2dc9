"""Switch the generation of a graph, as its owner.

A switch waits for commits and deployments, maybe for minutes, so it occupies no thread of a lane: other actions go on
beside it. The end of the API cancels it, and its transaction then has changed nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from millpy.api.problems import busy
from millpy.config.database_url import with_setting
from millpy.store.postgres.store import PostgresStore

BEHIND_US_MAX = 60_000_000
SWITCHES_MAX = 20
"""Switches that are made or wait."""


class Switches:
    """Makes switches, one after another.

    Args:
        url: the database, as its owner.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._turn = asyncio.Lock()
        self._count = 0

    async def switch(
        self,
        actor: str,
        graph: str,
        generation: int,
        *,
        anyway: bool,
        rights: Literal["current", "new"] | None,
    ) -> dict[str, Any]:
        """Make a generation of a graph current, in one transaction; return what was done.

        Args:
            actor: who requests it.
            graph: the graph's name, without generation.
            generation: the generation.
            anyway: whether to switch even if it has not caught up.
            rights: which rights to keep where those on the tables differ.

        Raises:
            UsageError: the generation does not exist, or is refused.
            ProblemError: too many switches wait.
        """
        if self._count >= SWITCHES_MAX:
            raise busy()
        self._count += 1
        escaped = actor.replace("\\", "\\\\").replace(" ", "\\ ")
        try:
            async with self._turn, PostgresStore(with_setting(self._url, "millpy.actor", escaped)) as store:
                behind_us_max = None if anyway else BEHIND_US_MAX
                found = await store.switch(graph, generation, behind_us_max=behind_us_max, rights=rights)
        finally:
            self._count -= 1
        answer: dict[str, Any] = {"graph": graph, "current": generation, "switched": found is not None}
        return answer if found is None else answer | {"before": found.before.generation, "left": list(found.left)}

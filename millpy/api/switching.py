"""Switch the generation of a graph, as its owner."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from millpy.config.database_url import with_setting
from millpy.store.postgres.store import PostgresStore

BEHIND_US_MAX = 60_000_000


def switch_generation(
    url: str, actor: str, graph: str, generation: int, *, anyway: bool, rights: Literal["current", "new"] | None
) -> dict[str, Any]:
    """Make a generation of a graph current, in one transaction; return what was done.

    Args:
        url: the database, as its owner.
        actor: who requests it.
        graph: the graph's name, without generation.
        generation: the generation.
        anyway: whether to switch even if it has not caught up.
        rights: which rights to keep where those on the tables differ.

    Raises:
        UsageError: the generation does not exist, or is refused.
    """
    escaped = actor.replace("\\", "\\\\").replace(" ", "\\ ")

    async def switched() -> dict[str, Any]:
        async with PostgresStore(with_setting(url, "millpy.actor", escaped)) as store:
            behind_us_max = None if anyway else BEHIND_US_MAX
            found = await store.switch(graph, generation, behind_us_max=behind_us_max, rights=rights)
        answer: dict[str, Any] = {"graph": graph, "current": generation, "switched": found is not None}
        return answer if found is None else answer | {"before": found.before.generation, "left": list(found.left)}

    return asyncio.run(switched())

"""One more stream before a deployed step: a source that is added to a union.

The step reads the stream from the end of what its producers have committed. Its watermark must not go back (I5): a new
source begins at it; a deployed stream must have reached it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from millpy.model.deployment import SubscriptionSpec
from millpy.model.time import INSTANT_MAX
from millpy.model.united_streams import behind_error, ended
from millpy.store.postgres.arrays import Texts
from millpy.store.postgres.connection import Connection, all_rows
from millpy.store.postgres.statements import statement


async def unite(
    connection: Connection, graph_id: int, united: Sequence[SubscriptionSpec], new_sources: Collection[str]
) -> None:
    """Add the cursors of registered subscriptions of deployed steps, and begin new sources at their watermarks.

    Raises:
        GraphError: the watermark of a deployed stream is behind the step, or all sources of the step have ended.
    """
    of: dict[str, Any] = {"graph_id": graph_id}
    for stream in dict.fromkeys(subscription.stream for subscription in united):
        consumers = [subscription.consumer for subscription in united if subscription.stream == stream]
        asked = {**of, "consumer_names": Texts(consumers)}
        ((reached,),) = await all_rows(connection, statement("read_watermark_to_join"), asked)
        if reached >= INSTANT_MAX:
            raise ended(stream, consumers[0])
        if stream in new_sources:
            await connection.execute(
                statement("begin_united_source"), {**of, "computation": stream, "reached": reached}
            )
        for consumer in consumers:
            place = {**of, "stream": stream, "consumer": consumer}
            await connection.execute(statement("join_united_cursors"), place)
            for at, needed in await all_rows(connection, statement("read_behind"), place):
                raise behind_error(stream, consumer, at, needed)

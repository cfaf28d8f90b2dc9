"""Canary: takes a producer's watermark three seconds further than the position that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from millpy.model.time import INSTANT_MAX, INSTANT_MIN, Instant
from millpy.process import assembly
from millpy.store.postgres.store import PostgresStore
from tests.crash.graph import graph

__all__ = ["graph"]


def ahead(watermark: int) -> Instant:
    return Instant(watermark + 3_000_000 if INSTANT_MIN < watermark < INSTANT_MAX else watermark)


class WatermarkAhead(PostgresStore):
    async def poll(self, *arguments: Any, **options: Any) -> Any:
        return [
            replace(
                answer,
                head_watermark=ahead(answer.head_watermark),
                segments=tuple(replace(s, watermark=ahead(s.watermark)) for s in answer.segments),
            )
            for answer in await super().poll(*arguments, **options)
        ]


assembly.PostgresStore = WatermarkAhead  # type: ignore[misc, attr-defined]

"""Reads a file source to its end, outside of any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from millpy.ingest.protocol import SourceBatch, SourceSetup
from millpy.sources.files.source import Files


def taken_from(source: Files, setup: SourceSetup) -> Iterator[SourceBatch]:
    """Yield the batches of the source's reader, as a worker receives them."""
    loop = asyncio.new_event_loop()
    injector = source.connect(setup)

    async def next_one() -> SourceBatch:
        while (taken := await injector.take()) is None:
            setup.ready.clear()
            await setup.ready.wait()
        return taken

    try:
        loop.run_until_complete(injector.open(None))
        while True:
            taken = loop.run_until_complete(next_one())
            yield taken
            if taken.finished:
                return
    finally:
        loop.run_until_complete(injector.close())
        loop.close()

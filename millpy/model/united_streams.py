"""Why a stream cannot be added to a deployed step now, nor a partition to a source."""

from __future__ import annotations

from millpy.errors import GraphError


def ended(stream: str, consumer: str) -> GraphError:
    """Return the error for a step whose watermark has reached the end of time."""
    return GraphError(
        f"{consumer} cannot read {stream}: all its sources have ended, so every record would be late",
        hint="make it the next generation: Graph(…, generation=…)",
    )


def behind_error(stream: str, consumer: str, at: str, needed: str) -> GraphError:
    """Return the error for a stream whose watermark is behind the step's."""
    return GraphError(
        f"{consumer} cannot read {stream} yet: its watermark {at} is behind that of the step, {needed}, which never "
        "goes back",
        hint="try again when it has caught up, or read the source anew under another name",
    )


def ended_source(source: str, partition: str) -> GraphError:
    """Return the error for a partition of a source whose watermark has reached the end of time."""
    return GraphError(
        f"source partition {partition!r} cannot join {source}: the source has ended, so every record would be late",
        hint="make it the next generation: Graph(…, generation=…)",
    )

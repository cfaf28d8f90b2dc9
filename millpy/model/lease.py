"""What the database answers to the renewal of a lease."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Renewal:
    """A lease that was renewed.

    Attributes:
        drain_requested: whether an operator has requested that the worker drains.
    """

    drain_requested: bool = False

"""Which panes a window gives besides those that have new records, and what its panes say of themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from millpy.errors import GraphError


class FiringBehavior(Enum):
    """Whether a pane without new records is emitted: see `KeyedStream.window`.

    Beam's `OnTimeBehavior` and `ClosingBehavior`.

    Attributes:
        IF_NOT_EMPTY: only if records have come since the pane before.
        ALWAYS: also if none has.
    """

    IF_NOT_EMPTY = "if_not_empty"
    ALWAYS = "always"

    def __repr__(self) -> str:
        return f"FiringBehavior.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaneRules:
    """Which empty panes a window gives, and whether panes have the columns of `PANE_INFO`.

    Attributes:
        on_time_pane: whether its pane on time is emitted if it is empty.
        final_pane: whether its last pane is.
        pane_info: whether the stream and the table have `PANE_INFO`.

    Raises:
        GraphError: a value has another type.
    """

    on_time_pane: FiringBehavior = FiringBehavior.IF_NOT_EMPTY
    final_pane: FiringBehavior = FiringBehavior.IF_NOT_EMPTY
    pane_info: bool = False

    def __post_init__(self) -> None:
        for name in ("on_time_pane", "final_pane"):
            if not isinstance(value := getattr(self, name), FiringBehavior):
                raise GraphError(
                    f"{name}={value!r} is not a behavior", hint=f"for example {name}=FiringBehavior.ALWAYS"
                )
        if not isinstance(self.pane_info, bool):
            raise GraphError(f"pane_info={self.pane_info!r} is neither True nor False", hint="pane_info=True")

    @property
    def with_empty_panes(self) -> bool:
        """Whether panes without new records may be emitted."""
        return FiringBehavior.ALWAYS in (self.on_time_pane, self.final_pane)

    def described(self) -> dict[str, Any]:
        """Describe what differs from the default."""
        found: dict[str, Any] = {}
        for name in ("on_time_pane", "final_pane"):
            if (behavior := getattr(self, name)) is not FiringBehavior.IF_NOT_EMPTY:
                found[name] = behavior.value
        if self.pane_info:
            found["pane_info"] = True
        return found


DEFAULT_RULES = PaneRules()

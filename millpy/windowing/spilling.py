"""Key intervals whose windows may wait in the store: see `closed_windows.py` and `unfired_windows.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from millpy.model.stage import StepResult, StoredInterval, Work
from millpy.windowing.fixed_state import OpenWindows
from millpy.windowing.operator import WindowedInterval
from millpy.windowing.unfired_windows import UnfiredWindows
from millpy.windowing.window_spec import WindowSpec

OpenT = TypeVar("OpenT", bound=OpenWindows)


class SpillingInterval(WindowedInterval[OpenT]):
    """Soft state of one key interval, of windows that do not merge."""

    _unfired_spill = False
    """Whether windows that have not fired may leave memory, too."""

    def _spill_beyond(self, windowing: WindowSpec, recovered: StoredInterval) -> None:
        """Let windows wait in the store, if they may; call it before `_recover`."""
        if windowing.spills and not self._input.site and not self._binding.is_taken:
            limits, intervals = self._binding.limits, self._binding.windowed_intervals
            self._unfired_spill = windowing.unfired_spill(self._accumulators)
            unfired = limits.unfired_bytes_max // intervals if self._unfired_spill else None
            closed = limits.closed_windows_bytes_max // intervals
            self._open.spill_to(self._input.key_types, closed, recovered, unfired)

    @property
    def immediate(self) -> bool:
        """Whether a step calls no user code, and all windows are in memory."""
        spilled = self._open.spilled
        return super().immediate and (spilled is None or not spilled.stored)

    def on_folded(self, bundle: int) -> None:
        """Allow windows last changed at or before `bundle` to leave memory: they are rows now."""
        if self._open.spilled is not None:
            self._open.spilled.spill(bundle, self._open.first_open_end())

    def expired_windows(self) -> Sequence[tuple[str, int]]:
        """Return (subkey, bundle) of the stored windows that have expired in a bundle, and may have rows."""
        return () if self._open.spilled is None else tuple(self._open.spilled.expired)

    def on_windows_deleted(self, bundle: int) -> None:
        """Forget the stored windows that have expired at or before `bundle`."""
        if self._open.spilled is not None:
            self._open.spilled.on_deleted(bundle)

    def needs_fold(self) -> bool:
        """Tell whether windows that may leave memory exceed their bound."""
        spilled = self._open.spilled
        return spilled is not None and spilled.needs_fold(self._open.first_open_end())

    def waits_for_fold(self) -> bool:
        """Tell whether they exceed it by half, and have changed since the last fold."""
        spilled = self._open.spilled
        return spilled is not None and spilled.is_over(self._open.first_open_end())

    def step(self, work: Work) -> StepResult:
        """Apply one turn's work to the open windows and return the result to commit."""
        if self._open.spilled is not None:
            self._open.spilled.load = work.load_windows
        if isinstance(self._open.spilled, UnfiredWindows):
            self._open.spilled.query = work.query_windows
        return super().step(work)

    def _held_bytes(self) -> int:
        """Return the memory of windows that cannot leave it: 0 if those that have not fired may, too."""
        return 0 if self._unfired_spill else super()._held_bytes()

    def _counted_bytes(self) -> int:
        """Return the memory that counts against the bound: windows that can wait in the store do not."""
        if self._unfired_spill:
            return 0
        return super()._counted_bytes() if self._open.spilled is None else self._open.open_bytes()

"""Display: how far a crash test is, on a terminal in place, else line by line."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import (
    Progress as Bars,
)
from rich.text import Text

from millpy.clock import Clock
from millpy.testing.crash_test.faults import Struck
from millpy.testing.crash_test.trial import Progress
from millpy.visible import visible

TITLES = {
    "reference": "Reference: one worker, no faults",
    "reference_2": "Reference again: other workers, other bundles",
    "crash": "Crash run",
}
LINE_EVERY_S = 2.0
RECENT = 8


class Display(Protocol):
    """What a session tells while it runs."""

    def say(self, line: str) -> None:
        """One line."""
        ...

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """A trial runs inside."""
        ...

    def show(self, progress: Progress) -> None:
        """How far it is; called often."""
        ...

    def tell(self, fault: Struck) -> None:
        """A fault has struck or was recovered from."""
        ...


def display_for(console: Console, clock: Clock) -> Display:
    """In place on a terminal, line by line when piped."""
    return Live_(console) if console.is_terminal else Lines(console, clock)


def sentence(fault: Struck) -> str:
    """What happened, in one line."""
    number = f"fault {fault.number}: {fault.what}"
    if fault.recovered is None:
        return f"{number} (owned {fault.owned} intervals)" if fault.slot is not None else number
    return f"{number}: recovered in {fault.recovered - fault.at:.2f} s"


class Lines:
    """A line for each thing that happens, and one every two seconds."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._next = 0.0

    def say(self, line: str) -> None:
        """One line."""
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Say what begins."""
        self.say(TITLES[name])
        self._next = self._clock.monotonic() + LINE_EVERY_S
        yield

    def show(self, progress: Progress) -> None:
        """A line every two seconds."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_EVERY_S
        faults = f", faults {progress.recovered}/{progress.faults}" if progress.faults else ""
        self.say(f"  committed {progress.committed:,} of {progress.total:,} records{faults}")

    def tell(self, fault: Struck) -> None:
        """A line."""
        self.say(f"  {sentence(fault)}")


class Live_:  # noqa: N801 - rich's own class has the name
    """Bars that move, and the newest faults below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._recent: deque[str] = deque(maxlen=RECENT)
        self._bars = Bars(
            TextColumn("  {task.description:<10}"),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        self._committed = self._bars.add_task("records", total=None)
        self._faults = self._bars.add_task("faults", total=None, visible=False)

    def say(self, line: str) -> None:
        """One line above what moves."""
        self._console.print(visible(line), markup=False, highlight=False)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Show the bars while the trial runs."""
        self._recent.clear()
        self._bars.reset(self._committed, total=None)
        self._bars.reset(self._faults, total=None, visible=False)
        self._console.print(Text(TITLES[name], style="bold"))
        with Live(get_renderable=self._picture, console=self._console, refresh_per_second=8):
            yield

    def _picture(self) -> RenderableType:
        return Group(self._bars, *(Text(f"    {line}", style="dim") for line in self._recent))

    def show(self, progress: Progress) -> None:
        """Move the bars."""
        self._bars.update(self._committed, total=progress.total, completed=progress.committed)
        if progress.faults:
            self._bars.update(self._faults, total=progress.faults, completed=progress.recovered, visible=True)

    def tell(self, fault: Struck) -> None:
        """The newest faults stay in sight."""
        self._recent.append(sentence(fault))

"""Shows the progress of a crash test: in place on a terminal, else line by line."""

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
from millpy.config.escape import visible
from millpy.testing.crash_test.faults import InjectedFault
from millpy.testing.crash_test.run import TrialProgress

TITLES = {
    "reference": "Reference: one worker, no faults",
    "reference_2": "Reference again: other workers, other bundles",
    "crash": "Crash run",
}
LINE_EVERY_S = 2.0
RECENT = 8


class Display(Protocol):
    """Shows a session while it runs."""

    def say(self, line: str) -> None:
        """Show one line."""
        ...

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Show a trial for the duration of a `with` block."""
        ...

    def show(self, progress: TrialProgress) -> None:
        """Show the progress; the session calls this often."""
        ...

    def show_fault(self, fault: InjectedFault) -> None:
        """Show a fault that has struck, or the recovery from it."""
        ...


def display_for(console: Console, clock: Clock) -> Display:
    """Return a display: in place on a terminal, line by line when piped."""
    return LiveDisplay(console) if console.is_terminal else Lines(console, clock)


def sentence(fault: InjectedFault) -> str:
    """Describe a fault in one line."""
    number = f"fault {fault.number}: {fault.what}"
    if fault.recovered is None:
        return f"{number} (owned {fault.owned} intervals)" if fault.slot is not None else number
    return f"{number}: recovered in {fault.recovered - fault.at:.2f} s"


class Lines:
    """Prints a line for each event, and the progress every two seconds."""

    def __init__(self, console: Console, clock: Clock) -> None:
        self._console = console
        self._clock = clock
        self._next = 0.0

    def say(self, line: str) -> None:
        """Print one line."""
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def trial(self, name: str) -> Iterator[None]:
        """Print the name of the trial."""
        self.say(TITLES[name])
        self._next = self._clock.monotonic() + LINE_EVERY_S
        yield

    def show(self, progress: TrialProgress) -> None:
        """Print the progress, at most once every two seconds."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + LINE_EVERY_S
        faults = f", faults {progress.recovered}/{progress.faults}" if progress.faults else ""
        self.say(f"  committed {progress.committed:,} of {progress.total:,} records{faults}")

    def show_fault(self, fault: InjectedFault) -> None:
        """Print the fault or the recovery."""
        self.say(f"  {sentence(fault)}")


class LiveDisplay:
    """Shows moving bars, and the newest faults below them."""

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
        """Print one line above the bars."""
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

    def show(self, progress: TrialProgress) -> None:
        """Move the bars."""
        self._bars.update(self._committed, total=progress.total, completed=progress.committed)
        if progress.faults:
            self._bars.update(self._faults, total=progress.faults, completed=progress.recovered, visible=True)

    def show_fault(self, fault: InjectedFault) -> None:
        """Show the fault or the recovery below the bars, among the newest."""
        self._recent.append(sentence(fault))

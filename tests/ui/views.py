"""The views of the page, each as it shows the live world."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class View:
    """A view: its name in the navigation, and its path."""

    name: str
    path: str

    @property
    def slug(self) -> str:
        """Return the name for a file."""
        return self.name.lower().replace(" ", "-")


VIEWS = (
    View("Graph", "/graphs/works"),
    View("Windows", "/graphs/works/windows?table=temperature_5s&key.site=oslo&key.device=sensor-1"),
    View("Fleet", "/graphs/works/fleet"),
    View("Dead letters", "/graphs/works/set-aside"),
    View("Workers", "/graphs/works/workers"),
    View("Events", "/graphs/works/events"),
    View("Accounting", "/graphs/works/accounting"),
    View("State", "/graphs/works/state?computation=alarms"),
    View("Doctor", "/doctor?graph=works"),
)

"""`python -m tests.ui.tour`: the pictures of docs/page.md, of a world without hostile names."""

from __future__ import annotations

import tempfile
from pathlib import Path

from millpy.admin.tokens import Role
from tests.databases import fresh_database, passing_server
from tests.ui.browser import ROOT, Visitor, running_browser
from tests.ui.views import VIEWS
from tests.ui.world import FAULTY, SILENT, World, living
from tests.waiting import await_true

PICTURES = ROOT / "docs" / "assets" / "page"
SHOWN = ("graph", "windows", "fleet", "dead-letters", "workers", "accounting")
SIZE = (1280, 800)
LIVED_MS = 45_000


class QuietWorld(World):
    """A world as an operator has it on a usual day."""

    def fill(self) -> None:
        """Wait for windows, and send what every view has to show."""
        await_true(lambda: self.counts("SELECT count(*) AS n FROM works.temperature_5s"), "the first windows")
        self.feed.send("oslo", SILENT, 1.0)
        self.feed.send("lima", FAULTY, 13_000.0, note="probe 2")
        self.feed.send("oslo", "sensor-2", 150.0)
        self.feed.send("oslo", "sensor-0", 3.0, age_s=600)
        self.feed.send("oslo", "sensor-1", 24.0, age_s=20)
        self.feed.send_bytes("oslo", "sensor-3", b'{"at": 1764200000000, "id": 7, "value": "warm"}')
        self.feed.send_bytes("rome", "gateway", b"rebooted")
        await_true(lambda: self.counts("SELECT count(*) AS n FROM millpy.parked"), "a parked key")


def main() -> None:
    """Write the pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, passing_server(Path(place)) as server:
        with fresh_database(server) as name, running_browser() as browser:
            (directory := Path(place) / "works").mkdir()
            with living(server.url(name), directory, QuietWorld) as world:
                visitor = Visitor(browser, world.api.url, size=SIZE)
                visitor.log_in(world.api.token("olga", Role.OPERATOR))
                visitor.page.wait_for_timeout(LIVED_MS)
                for view in VIEWS:
                    if view.slug in SHOWN:
                        visitor.open(view.path).wait_for_timeout(6_000)
                        visitor.page.screenshot(path=PICTURES / f"{view.slug}.png")
                visitor.close()


if __name__ == "__main__":
    main()

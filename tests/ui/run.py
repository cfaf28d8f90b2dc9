"""`make ui-test`: all tests of the page, then one JSON document: `views, tests, failed, screenshots`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests.ui.browser import SCREENSHOTS
from tests.ui.views import VIEWS

HERE = Path(__file__).parent


class Outcomes:
    """Counts tests and failures; where the machine has no browser, the run is no success."""

    def __init__(self) -> None:
        self.tests = 0
        self.failed = 0
        self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a part of a test."""
        self.tests += report.when == "call"
        self.failed += report.failed
        self.skipped += report.skipped


def main() -> int:
    """Run the tests and return the exit status."""
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
    outcomes = Outcomes()
    status = pytest.main(["-q", "--durations=10", str(HERE), *sys.argv[1:]], plugins=[outcomes])
    pictures = len(list(SCREENSHOTS.glob("*.png")))
    document = {"views": len(VIEWS), "tests": outcomes.tests, "failed": outcomes.failed, "screenshots": pictures}
    if outcomes.skipped:
        document["skipped"] = outcomes.skipped
    print(json.dumps(document), flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

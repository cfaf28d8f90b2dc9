"""What the Makefile names is what its commands do."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_fuzz_tests_run_side_by_side_so_that_an_hour_is_an_hour() -> None:
    """Each file takes FUZZ_MINUTES, in one process."""
    files = [path for path in (ROOT / "tests" / "fuzz").glob("test_*.py") if "FUZZ_MINUTES" in path.read_text()]
    (processes,) = re.findall(r"-n (\d+) --dist loadfile tests/fuzz$", (ROOT / "Makefile").read_text(), re.MULTILINE)

    assert int(processes) == len(files)

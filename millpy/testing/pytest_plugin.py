"""The pytest plugin: the fixture `graph_driver`. pytest finds it by itself where millpy is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from millpy.graph import Graph
    from millpy.testing import GraphDriver


@pytest.fixture
def graph_driver(request: pytest.FixtureRequest) -> Iterator[Callable[..., GraphDriver]]:
    """Return a function that loads a graph and returns a driver for it.

    It takes the arguments of `millpy.testing.GraphDriver`. The name of a file is relative to the directory of the test,
    or else to the working directory. After the test, every record must be accounted for.
    """
    from millpy.testing import GraphDriver

    drivers: list[GraphDriver] = []

    def drive(graph: Graph | str | Path, **options: Any) -> GraphDriver:
        if isinstance(graph, str | Path):
            beside = request.path.parent / graph
            graph = beside if Path(str(beside).partition(":")[0]).is_file() else graph
        driver = GraphDriver(graph, **options)
        drivers.append(driver)
        return driver

    yield drive
    for driver in drivers:
        driver.check_accounting()

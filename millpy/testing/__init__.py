"""Test kit: drive a graph by hand, without database, broker or worker.

The names are loaded when they are used, so that importing this package, or a module of it, does not load the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpy.model.checkpoint import DeadLetter
    from millpy.testing.kit.contents import (
        BEGINNING_OF_TIME,
        END_OF_TIME,
        LateRecord,
        OpenWindow,
        Pane,
        Watermarks,
    )
    from millpy.testing.kit.driver import GraphDriver
    from millpy.testing.kit.manual_source import ManualSource
    from millpy.testing.kit.sink_suite import SinkSuite
    from millpy.testing.kit.source_suite import SourceSuite

__all__ = [
    "BEGINNING_OF_TIME",
    "END_OF_TIME",
    "DeadLetter",
    "GraphDriver",
    "LateRecord",
    "ManualSource",
    "OpenWindow",
    "Pane",
    "SinkSuite",
    "SourceSuite",
    "Watermarks",
]

_MODULES = {
    "BEGINNING_OF_TIME": "millpy.testing.kit.contents",
    "END_OF_TIME": "millpy.testing.kit.contents",
    "DeadLetter": "millpy.model.checkpoint",
    "GraphDriver": "millpy.testing.kit.driver",
    "LateRecord": "millpy.testing.kit.contents",
    "ManualSource": "millpy.testing.kit.manual_source",
    "OpenWindow": "millpy.testing.kit.contents",
    "Pane": "millpy.testing.kit.contents",
    "SinkSuite": "millpy.testing.kit.sink_suite",
    "SourceSuite": "millpy.testing.kit.source_suite",
    "Watermarks": "millpy.testing.kit.contents",
}


def __getattr__(name: str) -> Any:
    """Load a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

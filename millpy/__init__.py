"""Exactly-once stream processing on PostgreSQL, after MillWheel. This module is the public API;
`millpy.sources` and `millpy.sinks` have what a source or sink of your own is made of.

The first use of a name imports the engine: each command imports this module, too, and most of them need no engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpy.public import *  # noqa: F403
    from millpy.public import __all__ as __all__
else:  # or type checkers would take each name for one of this module

    def __getattr__(name: str) -> Any:
        if not name.startswith("__") or name == "__all__":
            public = import_module("millpy.public")
            globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
        if name not in globals():
            raise AttributeError(f"module 'millpy' has no attribute {name!r}")
        return globals()[name]


def __dir__() -> list[str]:
    return list(import_module("millpy.public").__all__)

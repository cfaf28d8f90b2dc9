"""Loading the graph that a user's Python file defines at module level."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from millpy.errors import MillError, UsageError
from millpy.graph import Graph, KeyedStream, Stream


def load_graph(location: str, text: str | None = None) -> Graph:
    """Run a file and return its graph.

    Args:
        location: `factory.py`, or `factory.py:name` if it defines several graphs.
        text: the content of the file, for a machine that need not have it; default: read it.

    Raises:
        UsageError: the file does not exist, fails (the message has file and line), or defines no or several graphs.
    """
    path_text, _, name = location.partition(":")
    path = Path(path_text)
    if text is None and not path.is_file():
        raise UsageError(
            f"there is no file {path_text}",
            hint="name the Python file that defines your graph; `millpy init` writes an example",
        )
    module = run_file(path, text)
    graphs = {key: value for key, value in vars(module).items() if isinstance(value, Graph)}
    if name:
        if name not in graphs:
            raise UsageError(
                f"{path_text} defines no graph {name!r}", hint=f"its graphs are: {', '.join(graphs) or 'none'}"
            )
        return graphs[name]
    distinct = {id(graph): key for key, graph in graphs.items()}
    if not distinct:
        raise UsageError(f"{path_text} defines no graph", hint='define one at module level: graph = Graph("factory")')
    if len(distinct) > 1:
        raise UsageError(
            f"{path_text} defines several graphs: {', '.join(graphs)}",
            hint=f"choose one: {path_text}:{next(iter(graphs))}",
        )
    return next(iter(graphs.values()))


def run_file(path: Path, text: str | None = None) -> ModuleType:
    """Run a user's file, or the text that it is to have. Return its module.

    Raises:
        UsageError: it is no Python file, or fails; the message has file and line.
    """
    name = f"_millpy_graph_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", hint="name a file that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # annotations are resolved there
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        if text is None:
            spec.loader.exec_module(module)
        else:
            exec(compile(text, str(path), "exec"), module.__dict__)
    except MillError as error:
        error.message = f"{_place(error, path)}: {error.message}"
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        detail = error.msg if isinstance(error, SyntaxError) else error
        raise UsageError(f"{_place(error, path)}: {type(error).__name__}: {detail}", hint=_advice(error)) from error
    finally:
        sys.path.pop(0)
    return module


def _advice(error: BaseException) -> str:
    if isinstance(error, AttributeError) and isinstance(error.obj, Stream) and hasattr(KeyedStream, str(error.name)):
        return f'give the stream a key first: .key_by("device").{error.name}(…)'
    if isinstance(error, SystemExit):
        return 'leave the process to millpy: call sys.exit() below `if __name__ == "__main__":`'
    if isinstance(error, ModuleNotFoundError):
        return f"install {error.name} in {sys.prefix}, or correct the file"
    return "correct the file"


def _place(error: BaseException, path: Path) -> str:
    """Return the line of the user's file at which `error` was raised, as `file:line`; the file if no line is known."""
    if isinstance(error, SyntaxError):
        here = error.filename is None or Path(error.filename).resolve() == path.resolve()
        return f"{path if here else error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f"{path}:{lines[-1]}" if lines else str(path)

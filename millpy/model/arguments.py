"""Checks of the arguments of a graph: what a type checker would refuse is refused when the graph is built, too."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from math import inf
from typing import Any

from millpy.errors import GraphError


def check_instance(what: str, given: object, kind: type, hint: str) -> None:
    """Raise GraphError if an argument is not an instance of a class; `what` names it in the message."""
    if isinstance(given, kind):
        return
    name = kind.__name__
    if isinstance(given, type) and issubclass(given, kind):
        raise GraphError(f"{what} is the class {given.__name__}, not an instance of it", hint=hint)
    article = "an" if name[0] in "AEIOU" else "a"
    raise GraphError(f"{what} is not {article} {name}: {given!r}", hint=hint)


def check_flags(**given: object) -> None:
    """Raise GraphError for an argument that is neither True nor False: any other, such as "no", would count as true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise GraphError(f"{name}={value!r} is neither True nor False", hint=f"{name}=True, or leave it out")


def check_texts(hint: str, **given: object) -> None:
    """Raise GraphError for an argument that is neither text nor None; without what it is, which may be a secret."""
    for name, value in given.items():
        if not isinstance(value, str | None):
            raise GraphError(f"{name}= is not text, but a {type(value).__name__}", hint=hint)


def are_texts(given: object) -> bool:
    """Tell whether an argument is a list or tuple of texts, not one text."""
    return isinstance(given, list | tuple) and all(isinstance(each, str) for each in given)


def is_number(given: object, least: float, most: float = inf) -> bool:
    """Tell whether an argument is a number (not a bool or NaN) from `least` to `most`."""
    return isinstance(given, int | float) and not isinstance(given, bool) and least <= given <= most


def is_whole(given: object, least: int, most: float = inf) -> bool:
    """Tell whether an argument is a whole number (not a bool) from `least` to `most`."""
    return isinstance(given, int) and is_number(given, least, most)


def check_function(
    what: str, function: Callable[..., Any], hint: str, *, takes: int = 1, awaits: bool = False, yields: bool = False
) -> None:
    """Raise GraphError for what is no function of that many arguments, or one that awaits or yields but must not.

    A function that yields by mistake returns a generator: as a condition it is always true, as a callback it never
    runs.
    """
    if not callable(function):
        raise GraphError(f"{what} needs a function, not {function!r}", hint=hint)
    name = getattr(function, "__qualname__", repr(function))
    if inspect.isasyncgenfunction(function) or (inspect.iscoroutinefunction(function) and not awaits):
        raise GraphError(f"{what} cannot await {name}", hint="use a plain function; a Computation may be async")
    if inspect.isgeneratorfunction(function) and not yields:
        raise GraphError(f"{what} cannot take what {name} yields", hint=hint)
    try:
        inspect.signature(function).bind(*[None] * takes)
    except TypeError as error:
        given = "one argument" if takes == 1 else f"{takes} arguments"
        raise GraphError(f"{what} calls {name} with {given}: {error}", hint=hint) from error
    except ValueError:
        return  # a builtin does not tell its parameters

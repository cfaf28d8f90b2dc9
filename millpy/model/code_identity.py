"""Identity of user code whose change would change the meaning of stored data: a digest of its functions and constants.

The digest covers what Python runs, not how it is written: comments, docstrings and formatting do not change it. It
covers the functions of a class and of its bases, and their attributes that are data, but not what the functions call.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from functools import cached_property
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary
from zoneinfo import ZoneInfo

from millpy.errors import SchemaError
from millpy.model.identity import canonical_json, identity_of_value

_DIGITS = 16
_LANGUAGE = ("abc", "typing")
"""Modules of classes, such as `Generic`, that say nothing of what a function does."""
_DIGESTS: WeakKeyDictionary[type, str] = WeakKeyDictionary()


def code_digest(kind: type, base: type) -> str:
    """Return a digest of what a class defines, or inherits from others than `base`, as hex digits.

    Attributes that `base` has, too, are left out, and so are the defaults of a dataclass's fields: they are in the
    identity by their values.

    The digest of a class is computed once, when a graph is built: a process that describes its graph again, after a
    switch or a deployment, runs the code that it has loaded, whatever its file has become since.
    """
    known = _DIGESTS.get(kind)
    if known is None:
        known = _DIGESTS[kind] = _digest(kind, base)
    return known


def _digest(kind: type, base: type) -> str:
    found = hashlib.sha256()
    elsewhere = {*vars(base), *getattr(kind, "__dataclass_fields__", ())}
    for owner in kind.__mro__:
        if owner in base.__mro__ or owner.__module__ in _LANGUAGE:
            continue
        for name, value in sorted(vars(owner).items()):
            for function in _functions(value):
                text = _text(function)
                if text:
                    found.update(f"{name}\0{text}\0".encode())
            if name not in elsewhere and not name.startswith("__"):
                found.update(_constant(name, value))
    return found.hexdigest()[:_DIGITS]


def _constant(name: str, value: Any) -> bytes:
    """Return the text of an attribute that is data; nothing of any other."""
    if callable(value) or hasattr(type(value), "__get__"):
        return b""
    try:
        text = canonical_json(identity_of_value(value.key if isinstance(value, ZoneInfo) else value))
    except SchemaError:
        return b""
    return name.encode() + b"\0" + text + b"\0"


def _functions(value: Any) -> list[FunctionType]:
    if isinstance(value, cached_property):
        return _functions(value.func)
    if isinstance(value, property):
        return [each for each in (value.fget, value.fset) if isinstance(each, FunctionType)]
    plain = getattr(value, "__wrapped__", value) if isinstance(value, staticmethod | classmethod) else value
    plain = inspect.unwrap(plain) if callable(plain) and not isinstance(plain, type) else plain
    return [plain] if isinstance(plain, FunctionType) else []


def _text(function: FunctionType) -> str:
    """Return the source of a function without comments and docstrings; its bytecode where there is no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        # Methods that `dataclass` makes have no source, and follow from the fields.
        generated = function.__name__.startswith("__") and function.__code__.co_filename == "<string>"
        return "" if generated else _bytecode(function.__code__)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _bytecode(code: CodeType) -> str:
    constants = [_bytecode(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {constants} {code.co_names}"

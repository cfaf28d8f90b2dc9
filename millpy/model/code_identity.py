"""Identity of user code whose change would change the meaning of stored data: a digest of its functions.

The digest covers what Python runs, not how it is written: comments, docstrings and formatting do not change it. It
covers the functions of a class and of its bases, but not what these call.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from types import CodeType, FunctionType
from typing import Any

_DIGITS = 16


def code_digest(kind: type, base: type) -> str:
    """Return a digest of the functions that a class defines, or inherits from classes below `base`, as hex digits."""
    found = hashlib.sha256()
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        for name, value in sorted(vars(owner).items()):
            for function in _functions(value):
                text = _text(function)
                if text:
                    found.update(f"{name}\0{text}\0".encode())
    return found.hexdigest()[:_DIGITS]


def _functions(value: Any) -> list[FunctionType]:
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

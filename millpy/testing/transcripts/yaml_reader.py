"""YAML as transcripts use it: plain data within bounds, and where each value is written.

It is YAML without what surprises: no anchors and aliases (a few lines of them make billions of values), no tags, no key
twice, and no guessed types except null, true, false and numbers. A time stays text: YAML 1.1 would read 12:30 as 750.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from millpy.errors import UsageError

BYTES_MAX = 262_144
"""The largest file; it takes about two seconds to read."""
DEPTH_MAX = 20
"""How deep values may be nested."""
_PATH = re.compile(r"\.(\w+)|\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """One document of a file.

    Attributes:
        value: its content, of dicts, lists, text, numbers, booleans and None.
        line: the line at which it begins, from 1.
    """

    value: Any
    line: int
    _node: yaml.Node

    def line_of(self, path: str) -> int:
        """Return the line of the value at a path as msgspec writes it: `$.steps[3].bundle`."""
        node = self._node
        for name, index in _PATH.findall(path):
            if name and isinstance(node, yaml.MappingNode):
                found = [value for key, value in node.value if key.value == name]
                if not found:
                    break
                node = found[0]
            elif index and isinstance(node, yaml.SequenceNode) and int(index) < len(node.value):
                node = node.value[int(index)]
            else:
                break
        return int(node.start_mark.line) + 1


def read_yaml(text: bytes, file: str) -> Iterator[YamlDocument]:
    """Yield the documents of a file.

    Raises:
        UsageError: the text is too large or too deep, is not YAML, or uses what transcripts do not have.
    """
    if len(text) > BYTES_MAX:
        raise UsageError(
            f"{file} has {len(text):,} bytes; a file of transcripts has at most {BYTES_MAX:,}",
            hint="split the file; `copies:` repeats a record",
        )
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            yield YamlDocument(loader.construct_document(node), int(node.start_mark.line) + 1, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark is not None else file
        raise UsageError(f"{place}: {error.problem or error.context}", hint="correct the YAML") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{file}: {' '.join(str(error).split())}", hint="correct the YAML") from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # the library has no types
    """A loader of plain data."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node, which is neither an alias, nor anchored, nor too deep."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.MarkedYAMLError(problem="anchors and aliases are not allowed", problem_mark=event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="tags are not allowed", problem_mark=event.start_mark)
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {DEPTH_MAX} levels", problem_mark=event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        """Construct a dict, whose keys are different texts."""
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be text", problem_mark=key_node.start_mark)
            if key in found:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} occurs twice", problem_mark=key_node.start_mark)
            found[key] = self.construct_object(value_node, deep=deep)
        return found


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("tag:yaml.org,2002:null", r"^(?:~|null|)$", ["~", "n", ""]),
    ("tag:yaml.org,2002:bool", r"^(?:true|false)$", ["t", "f"]),
    ("tag:yaml.org,2002:int", r"^-?(?:0|[1-9][0-9]{0,37})$", list("-0123456789")),
    ("tag:yaml.org,2002:float", r"^-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]+)?$", list("-0123456789")),
):
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), _first)

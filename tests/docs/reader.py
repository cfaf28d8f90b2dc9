"""A reader who follows the instructions of a page from top to bottom."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import psycopg
import yaml

import millpy.spark
from millpy import Graph
from millpy.graph.loader import load_graph
from millpy.limits import Limits
from millpy.process.assembly import run_worker
from millpy.store.postgres.store import PostgresStore
from tests.commands import millpy as run_command
from tests.docs import page_names
from tests.docs.blocks import ROOT, Block, blocks_of
from tests.docs.commands import commands_in, faults_of

COMPLETE = re.compile(r"^(?:from millpy|import msgspec)(?:.|\n)*^graph = Graph\(", re.MULTILINE)


class Reader:
    """One page, one namespace, one directory, one database."""

    def __init__(self, path: Path, directory: Path, database_url: str) -> None:
        self.path = path
        self.directory = directory
        self.database_url = database_url
        self.deployed: set[str] = set()
        self.printed = ""
        # A module, because msgspec looks annotations up there.
        self.module = ModuleType(f"page_{path.stem.replace('-', '_')}")
        self.module.__dict__.update(page_names.names() | {"__name__": self.module.__name__})

    def follow(self, blocks: list[Block]) -> None:
        """Execute the blocks; an AssertionError or the block's own error names its line."""
        sys.modules[self.module.__name__] = self.module
        try:
            for block in blocks:
                if "title" in block.options:
                    path = self.directory / block.options["title"]
                    path.parent.mkdir(parents=True, exist_ok=True)  # a topic
                    path.write_text(block.body)
                getattr(self, block.language, self.ignore)(block)
            self.graphs()
        finally:
            del sys.modules[self.module.__name__]

    def ignore(self, block: Block) -> None:
        """A language that is not tested."""

    def python(self, block: Block) -> None:
        if block.options.get("title", "").startswith("test_"):
            self.tests(block)
            return
        code = compile("\n" * (block.line - 1) + block.body, str(block.path), "exec", dont_inherit=True)
        if block.test == "other":
            return
        replaced: dict[str, Any] = {}
        if block.test == "signatures":
            helpers = ("session", "read_table", "run", "stream", "read_results", "backfill")
            replaced = {name: mock.create_autospec(getattr(millpy.spark, name)) for name in helpers}
        with mock.patch.multiple(millpy.spark, **replaced) if replaced else nullcontext():
            exec(code, self.module.__dict__)
        if COMPLETE.search(block.body):
            self.alone(block)

    def tests(self, block: Block) -> None:
        """Tests of a reader's own pass, beside the files that the page has had until then."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", block.options["title"]]
        done = subprocess.run(command, cwd=self.directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{block}:\n{done.stdout}"

    def alone(self, block: Block) -> None:
        """A whole graph needs no names but its own: it is a file that a reader copies."""
        copied = self.directory / "copied.py"
        copied.write_text(block.body)
        load_graph(str(copied)).spec()

    def console(self, block: Block) -> None:
        for command in commands_in(block.body):
            assert list(faults_of(command)) == [], f"{block}: {command}"
            if block.test == "run" and command.startswith("millpy test "):
                self.printed = run_command(*shlex.split(command)[1:])
            elif block.test == "run":
                program = re.fullmatch(r"millpy run (\S+\.py).*", command)
                assert program, f"{block}: only `millpy run FILE.py` and `millpy test` can be run here"
                asyncio.run(run_worker(load_graph(str(self.directory / program[1])), self.database_url))

    def sql(self, block: Block) -> None:
        if block.test == "other":
            return
        for graph in self.graphs() or readme_graphs():
            if graph.name not in self.deployed:
                asyncio.run(deploy(graph, self.database_url))
                self.deployed.add(graph.name)
        with psycopg.connect(self.database_url, options="-c timezone=UTC") as connection:
            cursor = connection.execute(block.body.encode())
            self.printed = printed(cursor)
            connection.rollback()

    def text(self, block: Block) -> None:
        if block.test == "result":
            assert plain(block.body) == plain(self.printed), f"{block}: it prints\n{self.printed}"

    def json(self, block: Block) -> None:
        lines = block.body.splitlines() if block.options.get("title", "").endswith(".ndjson") else [block.body]
        for line in lines:
            json.loads(line)

    def yaml(self, block: Block) -> None:
        assert yaml.safe_load(block.body), f"{block} is empty"

    def toml(self, block: Block) -> None:
        assert tomllib.loads(block.body), f"{block} is empty"

    def graphs(self) -> list[Graph]:
        """The graphs that the page has made so far and that compute something, as they would be deployed."""
        made = {id(value): value for value in vars(self.module).values() if isinstance(value, Graph)}
        found = []
        for graph in made.values():
            if any(stream.producer in graph.nodes for stream in graph.streams()):
                graph.spec()
                found.append(graph)
        return [graph for graph in found if graph.name != "given"]


def readme_graphs() -> list[Graph]:
    """The graph of the README, whose tables the pages without a graph mention."""
    readme = ROOT / "README.md"
    reader = Reader(readme, Path(), "")
    reader.follow([block for block in blocks_of(readme) if block.language == "python" and "Graph(" in block.body])
    return reader.graphs()


async def deploy(graph: Graph, database_url: str) -> None:
    """Its schema and tables, without a worker."""
    store = PostgresStore(database_url, limits=Limits())
    await store.open()
    try:
        await store.deploy(graph.spec())
    finally:
        await store.close()


def printed(cursor: psycopg.Cursor[Any]) -> str:
    """The rows as psql shows them."""
    result = cursor.pgresult
    if result is None or not result.nfields:
        return ""
    rows = [[(result.fname(column) or b"").decode() for column in range(result.nfields)]]
    for row in range(result.ntuples):
        rows.append([(result.get_value(row, column) or b"").decode() for column in range(result.nfields)])
    widths = [max(len(row[column]) for row in rows) for column in range(result.nfields)]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])


def plain(table: str) -> list[str]:
    """A table without what depends on widths."""
    return [re.sub(r"\s*\|\s*", "|", line.strip()) for line in table.splitlines() if not re.fullmatch(r"[-+ ]*", line)]

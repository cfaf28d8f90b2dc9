"""The recorded feeds through killed workers and archivers; what do audits say, before and after rows are falsified?

    python -m tests.feeds.through_audit [FEED ...]        (make feeds-audit)

`millpy audit` compares all result tables: by a batch over the sources' files, by a batch over the archives, and by
Spark's own windows (native). Then a row of each table is changed, one is deleted and one is added, and each must be
named: key and window, for a changed one the column and both values, and the window's records. Then the rows are put
back. The last line is JSON: tables (one for each audit of it), rows, differences (of audits without
falsified rows, and others than those falsified), not_native (tables that the native engine leaves out), uncertain
(windows that it leaves out), falsified, named, kills. Exit status 0 only when nothing differs and all are named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from millpy.cli.app import app
from millpy.embedded import EmbeddedPostgres
from millpy.graph.loader import load_graph
from millpy.spark import session
from millpy.store.postgres.deployment.migrate import migrate
from tests.crash.harness import Worker, await_true
from tests.feeds.falsified import Falsifier, Planted
from tests.feeds.feed import DATA, FEEDS, Feed
from tests.feeds.through_mqtt import GENTLE, TRAPS

RUN_S_MAX = 600
ENGINES = ("files", "archive", "native")


def computed(feed: Feed, url: str, directory: Path, archive: Path) -> int:
    """Run workers and archivers to the end of a feed; return how many of them were killed."""
    command = [sys.executable, "-m", "millpy", "archive", str(feed.graph), "--database", url, "--to", str(archive)]
    kills = 0
    with ExitStack() as stack, (directory / f"{feed.name}.log").open("wb") as log:
        for trap in TRAPS:
            trapped = Worker(directory, url, Path("none"), graph=feed.graph, failpoint=trap, **GENTLE)
            stack.enter_context(trapped).process.wait(RUN_S_MAX)
            kills += trapped.process.returncode == -signal.SIGKILL
        archiver = subprocess.Popen([*command, "--every", "0.2"], start_new_session=True, stdout=log, stderr=log)
        await_true(lambda: archiver.poll() is not None or any(archive.rglob("*.parquet")), "archived", RUN_S_MAX)
        if archiver.poll() is None:
            os.killpg(archiver.pid, signal.SIGKILL)
        kills += archiver.wait() == -signal.SIGKILL
        last = stack.enter_context(Worker(directory, url, Path("none"), graph=feed.graph, **GENTLE))
        subprocess.run(command, check=True, timeout=RUN_S_MAX, stdout=log, stderr=log)
        last.await_finished(RUN_S_MAX)
    return kills


class FeedAudit:
    """The audits of one feed.

    Args:
        feed: the feed.
        url: the database in which workers have computed it.
        archive: the directory in which archivers have kept it.
    """

    def __init__(self, feed: Feed, url: str, archive: Path) -> None:
        self._feed = feed
        self._url = url
        kept = ["--archive", str(archive)]
        self._options = {
            "files": ["--engine", "hosted"],
            "archive": ["--engine", "hosted", *kept],
            "native": ["--engine", "native", *kept],
        }
        self.totals: Counter[str] = Counter()

    def run(self, engine: str, what: str) -> dict[str, Any]:
        """Audit all tables."""
        began = time.monotonic()
        command = ["audit", str(self._feed.graph), "--database", self._url, *self._options[engine], "--json"]
        done = CliRunner().invoke(app, command)
        assert done.stdout, (done.output, done.exception)
        document: dict[str, Any] = json.loads(done.stdout)
        tables = document["tables"]
        words = [f"{self._feed.name:20} {engine:8} {what:12} {len(tables):>6}"]
        words += [f"{sum(table['rows'] for table in tables):>9,} {document['differences']:>12,}"]
        print(*words, f"{time.monotonic() - began:6.0f} s", flush=True)
        return document

    def find_nothing(self, what: str, *engines: str) -> None:
        """Audit tables in which nothing is falsified; print what is left out."""
        for engine in engines:
            document = self.run(engine, what)
            self.totals["not_native"] = max(self.totals["not_native"], len(document["not_audited"]))
            for reason, count in Counter(document["not_audited"].values()).items():
                print(f"  {count} tables left out: {reason}")
            for table in document["tables"]:
                self.totals.update({name: table[name] for name in ("rows", "differences", "uncertain")} | {"tables": 1})
                for example in table["examples"][:2]:
                    print(f"  {table['table']}: {example}")
                if table["left_out"] or table["uncertain"]:
                    print(f"  {table['table']}: without {table['left_out']}, without {table['uncertain']} windows")

    def find(self, planted: dict[str, list[Planted]], *engines: str) -> None:
        """Audit falsified tables: is each difference named, and no other?"""
        for engine in engines:
            for table in self.run(engine, "falsified")["tables"]:
                own, found = planted[table["table"]], table["examples"]
                missed = [one for one in own if not one.is_named(found, with_records="window_start" in one.row)]
                self.totals.update(falsified=len(own), named=len(own) - len(missed))
                self.totals["differences"] += abs(table["differences"] - len(own))
                if missed or table["differences"] != len(own):
                    print(f"  {table['table']}: not named: {missed}; found: {found}")


def audited(feed: Feed, url: str, archive: Path) -> Counter[str]:
    """Audit a feed as it is, falsified, and restored; return the counts."""
    audits = FeedAudit(feed, url, archive)
    spec = load_graph(str(feed.graph)).spec()
    audits.find_nothing("as it is", *ENGINES)
    with closing(Falsifier(url, feed.name)) as falsifier:
        planted = {table.name: falsifier.falsify(table) for table in spec.tables}
        audits.find(planted, "archive", "native")
        for table in spec.tables:
            falsifier.restore(table)
    audits.find_nothing("restored", "archive")
    return audits.totals


def main(names: list[str]) -> int:
    """Run some feeds, or all."""
    if not DATA.exists():
        print(f"the recorded feeds are not in {DATA}", file=sys.stderr)
        return 2
    totals: Counter[str] = Counter(dict.fromkeys(("tables", "rows", "differences", "not_native", "uncertain"), 0))
    print(f"{'feed':20} {'history':8} {'':12} {'tables':>6} {'rows':>9} {'differences':>12}")
    with tempfile.TemporaryDirectory(prefix="millpy-feeds-") as place:
        os.environ |= {"FEED_FILES": place, "FEED_ARCHIVED": "1"}  # before Spark starts, and its Python workers
        for name in ("FEED_BROKER", "FEED_DIRECTORIES"):
            os.environ.pop(name, None)
        spark = session(master="local[2,4]", memory="3g", name="audited feeds")
        for feed in (FEEDS[name] for name in names or FEEDS):
            directory = Path(place) / feed.name
            directory.mkdir()
            feed.write_files(Path(place))
            with EmbeddedPostgres(directory / "postgres") as server:
                migrate(server.url())
                totals["kills"] += computed(feed, server.url(), directory, directory / "archive")
                totals["differences"] += sum(wrong for _, wrong in feed.check(server.url()).values())
                totals.update(audited(feed, server.url(), directory / "archive"))
        spark.stop()
    print(json.dumps(totals))
    return int(totals["differences"] > 0 or totals["named"] < totals["falsified"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Play the mutants: `make mutants`, or python -m tests.mutants.run [--only WORDS] [--lines] [--jobs N].

Each mutant is made in a private copy of the tree and its killers are run there. First the killers run on the tree as it
is: a test that fails by itself would kill everything. Only a test that fails kills: not one that took too long, which
it may under load, nor one whose fixtures failed or that could not be imported. Prints a line for each mutant, the
survivors last, and ends with status 1 when one is not killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from xml.etree import ElementTree

from tests.mutants import everything
from tests.mutants.mutant import ROOT, Mutant

TOOLS = ROOT.parent / "shared"
RUN_S_MAX = 300
WHOLE_S_MAX = 60
"""For each test, when all of them run on the tree as it is."""
SURVIVED, KILLED, TOO_SLOW, NOT_PLAYED = "SURVIVED", "killed", "TOO SLOW", "NOT PLAYED"
PROFILE = "any failure"
"""The profile of Hypothesis, in tests/conftest.py, that looks for no small example."""
TIMED_OUT = "Failed: Timeout"
"""How pytest-timeout's failures begin."""


def copy_tree(into: Path) -> Path:
    """What git knows of, and what it does not ignore, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)
    return into


def run_tests(tree: Path, names: Sequence[str], within_s: float = RUN_S_MAX, how: Sequence[str] = ("-x",)) -> str:
    """What a mutant in this tree would be called."""
    report = report_of(tree)
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", *how, "-p", "no:randomly", "-p", "no:cacheprovider"]
    command += ["--timeout=120", f"--junitxml={report}", *names]
    if (tree / "tests" / "conftest.py").exists():
        command.append(f"--hypothesis-profile={PROFILE}")
    temporary = tree.parent / f"{tree.name}.tmp"
    temporary.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        "WITHIN_S": "60",  # less than the timeout of a test, which tells a test that failed from one that hangs
        "TMPDIR": str(temporary),
        "HYPOTHESIS_STORAGE_DIRECTORY": str(temporary / "hypothesis"),
    }
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return outcome(process.wait(within_s), report)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return TOO_SLOW
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def report_of(tree: Path) -> Path:
    """The report of the tests that ran last in a tree, in JUnit's format."""
    return tree.parent / f"{tree.name}.xml"


def outcome(status: int, report: Path) -> str:
    """What became of a mutant, by pytest's status and its report in JUnit's format."""
    if status == 0:
        skipped = report.exists() and next(ElementTree.parse(report).iter("skipped"), None) is not None
        return NOT_PLAYED if skipped else SURVIVED  # without its broker a test says nothing
    if status != 1 or not report.exists():
        return NOT_PLAYED  # the tests that are named could not be run
    failures = [failure.get("message", "") for failure in ElementTree.parse(report).iter("failure")]
    if not failures:
        return NOT_PLAYED  # before a test began
    return KILLED if any(not message.startswith(TIMED_OUT) for message in failures) else TOO_SLOW


def play(mutant: Mutant, tree: Path) -> str:
    """KILLED, or what happened instead."""
    path = tree / mutant.file
    whole = path.read_text()
    path.write_text(whole.replace(mutant.old, mutant.new))
    try:
        return run_tests(tree, mutant.killers)
    finally:
        path.write_text(whole)


def failing(killers: Iterable[str], tree: Path, jobs: int) -> list[str]:
    """Killers that fail although nothing is broken: each that is in doubt once more, alone."""
    names = sorted(set(killers))
    beside = ("-n", str(jobs), "--dist", "loadfile")
    if run_tests(tree, names, RUN_S_MAX + WHOLE_S_MAX * len(names), beside) == SURVIVED:
        return []
    files = files_in_doubt(report_of(tree))
    doubtful = [name for name in names if files is None or name.partition("::")[0] in files]
    return [name for name in doubtful if run_tests(tree, [name]) != SURVIVED]


def files_in_doubt(report: Path) -> set[str] | None:
    """The files of tests that did not pass; None if the report does not tell."""
    if not report.exists():
        return None
    found = set()
    for case in ElementTree.parse(report).iter("testcase"):
        if any(part.tag in ("failure", "error", "skipped") for part in case):
            parts = case.get("classname", "").split(".")
            paths = ("/".join(parts[:count]) + ".py" for count in range(len(parts), 0, -1))
            found |= {next((path for path in paths if (ROOT / path).is_file()), "")}
    return None if not found or "" in found else found


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description=__doc__)
    parser.add_argument("--only", default="", help="those whose file, text or line contains these words")
    parser.add_argument("--lines", action="store_true", help="those that break a line of docs/guarantees.md")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (default 2)")
    options = parser.parse_args(arguments)
    chosen = [
        m
        for m in everything()
        if options.only in f"{m} {m.line}" and not m.equivalent and (m.line or not options.lines)
    ]
    if faults := [f"{mutant}: {fault}" for mutant in everything() if (fault := mutant.fault())]:
        print("\n".join(faults))
        return 1
    outcomes: dict[Mutant, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        (Path(directory) / TOOLS.name).symlink_to(TOOLS)  # which the tests look for beside the project
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(options.jobs):
            trees.put(copy_tree(Path(directory) / str(number)))
        if broken := failing((name for m in chosen for name in m.killers), Path(directory) / "0", options.jobs):
            print("these fail on the tree as it is:", *broken, sep="\n  ")
            return 1

        def job(mutant: Mutant) -> None:
            tree, started = trees.get(), time.monotonic()
            try:
                outcomes[mutant] = play(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{outcomes[mutant]:10} {time.monotonic() - started:5.1f} s  {mutant}", flush=True)

        with ThreadPoolExecutor(options.jobs) as jobs:
            list(jobs.map(job, chosen))
    alive = [mutant for mutant in chosen if outcomes[mutant] != KILLED]
    equivalent = sum(1 for mutant in everything() if mutant.equivalent)
    print(f"\n{len(chosen)} mutants, {len(chosen) - len(alive)} killed; {equivalent} equivalent ones not played")
    for mutant in alive:
        print(f"{outcomes[mutant]}: {mutant}")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())

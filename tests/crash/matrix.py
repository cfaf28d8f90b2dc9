"""The crash matrix: every fault on real processes and a real PostgreSQL; are the results equal to the oracle's?

    python -m tests.crash.matrix [--only WORDS] [--jobs 2] [--list] [--keep]

Prints one line a case while it runs, then a table fault x outcome x recovery time, and as its last line one JSON
object: cases, intervals_recovered (that committed again after a fault), kills (that hit an interval with something
left to do), idle_kills (the others), lost, doubled, changed, recovery_median_s, recovery_max_s, and beyond them
violations (an invariant broken, a worker that failed, a recovery that did not come, a row that an audit found),
audited (cases whose tables Spark has audited: all that read the file), skipped, seconds. The exit status is 0 only
when everything that was played came out equal, without violations. Under MILLPY_CI=1 a skipped case is a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from millpy.embedded import EmbeddedPostgres
from tests.crash.audits import auditing
from tests.crash.cases import all_cases
from tests.crash.workload import expected_of, write_input
from tests.crash.world import Case, Inputs, Skipped, Verdict, play
from tests.databases import passing_server

RECORDS = 10_000
SHOWN_FAULTS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the cases; the exit status."""
    options = _options().parse_args(arguments)
    chosen = [case for case in all_cases() if all(word in case.name for word in options.only)]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    if not chosen:
        print(f"no case has {' and '.join(map(repr, options.only))} in its name", file=sys.stderr)
        return 2
    started = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="millpy-crash-"))
    try:
        verdicts, skipped = _play_all(chosen, directory, options.jobs, audits=options.audit)
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    print()
    print("\n".join(table(verdicts)))
    totals = summary(verdicts, skipped, time.monotonic() - started)
    print(json.dumps(totals), flush=True)
    return int(failed(totals, ci=os.environ.get("MILLPY_CI") == "1"))


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.crash.matrix")
    options.add_argument("--only", nargs="*", default=[], help="words that a case's name must contain")
    options.add_argument("--jobs", type=int, default=2, help="cases side by side")
    options.add_argument("--list", action="store_true", help="only name the cases")
    options.add_argument("--no-audit", dest="audit", action="store_false", help="do not audit the tables with Spark")
    options.add_argument("--keep", action="store_true", help="leave logs and databases behind")
    return options


def _play_all(chosen: Sequence[Case], directory: Path, jobs: int, *, audits: bool) -> tuple[list[Verdict], list[str]]:
    path = write_input(directory / "readings.ndjson", RECORDS)
    verdicts: list[Verdict] = []
    skipped: list[str] = []
    with (
        auditing(path) if audits else nullcontext() as audit,
        passing_server(directory / "postgres") as server,
        ThreadPoolExecutor(jobs) as pool,
    ):
        inputs = Inputs(path, expected_of(path), audit)
        places = [directory / f"case-{number}" for number in range(len(chosen))]
        for case, found in zip(chosen, pool.map(partial(_try, server, inputs), chosen, places), strict=True):
            if isinstance(found, Verdict):
                verdicts.append(found)
                print(_line(found), flush=True)
            else:
                skipped.append(case.name)
                print(f"skipped  {case.name}: {found}", flush=True)
    return verdicts, skipped


def _try(server: EmbeddedPostgres, inputs: Inputs, case: Case, directory: Path) -> Verdict | Skipped:
    try:
        return play(case, directory, server, inputs)
    except Skipped as skipped:
        return skipped


def _line(verdict: Verdict) -> str:
    recoveries = " ".join(f"{seconds:.2f}" for seconds in verdict.recoveries_s)
    words = [f"{outcome([verdict]):8} {verdict.case.name}: {verdict.took_s:.1f} s"]
    if recoveries:
        words.append(f"{sum(verdict.recovered)} intervals recovered in {recoveries} s")
    if verdict.idle_kills:
        words.append(f"{verdict.idle_kills} kills hit nothing")
    lines = [", ".join([*words, *verdict.notes])]
    lines += [f"         {fault}" for fault in verdict.faults[:SHOWN_FAULTS]]
    return "\n".join(lines)


def outcome(verdicts: Sequence[Verdict]) -> str:
    """What came out, in a word or two."""
    kinds = [("lost", "lost"), ("doubled", "doubled"), ("changed", "changed"), ("violation", "violations")]
    counts = [(sum(verdict.count(kind) for verdict in verdicts), word) for kind, word in kinds]
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "equal"


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Fault x outcome x recovery time, one line a fault."""
    names = list(dict.fromkeys(verdict.case.fault for verdict in verdicts))
    width = max(map(len, names))
    lines = [f"{'fault':{width}}  cases  outcome                 recovery median     max"]
    for name in names:
        group = [verdict for verdict in verdicts if verdict.case.fault == name]
        recoveries = [seconds for verdict in group for seconds in verdict.recoveries_s]
        times = f"{statistics.median(recoveries):13.2f} s {max(recoveries):5.2f} s" if recoveries else f"{'-':>13}"
        lines.append(f"{name:{width}}  {len(group):5}  {outcome(group):22}  {times}")
    return lines


def summary(verdicts: Sequence[Verdict], skipped: Sequence[str], seconds: float) -> dict[str, float | None]:
    """The last line."""
    recoveries = [found for verdict in verdicts for found in verdict.recoveries_s]

    def total(kind: str) -> int:
        return sum(verdict.count(kind) for verdict in verdicts)

    return {
        "cases": len(verdicts),
        "intervals_recovered": sum(sum(verdict.recovered) for verdict in verdicts),
        "kills": sum(verdict.kills for verdict in verdicts),
        "idle_kills": sum(verdict.idle_kills for verdict in verdicts),
        "lost": total("lost"),
        "doubled": total("doubled"),
        "changed": total("changed"),
        "recovery_median_s": round(statistics.median(recoveries), 3) if recoveries else None,
        "recovery_max_s": round(max(recoveries), 3) if recoveries else None,
        "violations": total("violation"),
        "audited": sum(verdict.audited for verdict in verdicts),
        "skipped": len(skipped),
        "seconds": round(seconds, 1),
    }


def failed(totals: dict[str, float | None], *, ci: bool) -> bool:
    """Tell whether the last line reports a fault."""
    return any(totals[kind] for kind in ("lost", "doubled", "changed", "violations")) or bool(ci and totals["skipped"])


if __name__ == "__main__":
    sys.exit(main())

"""Report: what a crash test has found, as one value; for the terminal, and as JSON."""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from millpy.testing.crash_test.compare import Change, Difference
from millpy.testing.crash_test.session import Tested
from millpy.testing.crash_test.verdict import Judgement, Verdict

SHOWN = 5
HEADLINES = {
    Judgement.EXACT: "EXACTLY ONCE: nothing lost, nothing doubled, nothing changed",
    Judgement.DIFFERENT: "NOT EXACTLY ONCE: the faults have changed the results",
    Judgement.UNSTEADY: "UNDECIDED: your code is not deterministic",
    Judgement.STUCK: "DID NOT FINISH",
}


def recoveries(tested: Tested) -> list[float]:
    """Seconds from each fault until all was whole again."""
    return [fault.recovered - fault.at for fault in tested.crash.struck if fault.recovered is not None]


def text(tested: Tested) -> str:
    """The verdict for a terminal."""
    verdict, crash = tested.verdict, tested.crash
    times = recoveries(tested)
    lines = ["", HEADLINES[verdict.judgement], ""]
    lines.append(
        f"  {crash.fed:,} records, {tested.options.workers} workers,"
        f" {len(crash.struck)} faults in {crash.seconds:.0f} s"
    )
    if times:
        lines.append(f"  recovery: median {statistics.median(times):.2f} s, longest {max(times):.2f} s")
    lines += [f"  {name}: {rows:,} rows compared" for name, rows in verdict.compared.items()]
    lines.append("  " + ", ".join(f"{change} {verdict.count(change)}" for change in Change))
    lines += [f"  {complaint}" for complaint in verdict.faults]
    lines += [f"  {described(difference)}" for difference in verdict.found[:SHOWN]]
    lines += list(_unsteady_lines(verdict))
    return "\n".join(lines)


def _unsteady_lines(verdict: Verdict) -> list[str]:
    lines = []
    for table, wavers in verdict.unsteady.items():
        what = f"columns {', '.join(sorted(wavers.columns))}" if wavers.columns else "rows come and go"
        lines.append(f"  {table}: two runs without any fault differ: {what}")
        lines += [f"    {described(difference)}" for difference in wavers.differences[:SHOWN]]
    return lines


def described(difference: Difference) -> str:
    """One difference in one line."""
    where = ", ".join(f"{name} {value}" for name, value in difference.identity.items())
    if difference.expected is not None and difference.found is not None and difference.columns:
        values = ", ".join(
            f"{name} {difference.found[name]} instead of {difference.expected[name]}" for name in difference.columns
        )
        return f"{difference.change} in {difference.table}: {where}: {values}"
    if difference.expected is None:
        return f"{difference.change} in {difference.table}: {where}: a row that should not be there"
    return f"{difference.change} in {difference.table}: {where}"


def as_json(tested: Tested) -> bytes:
    """The same for machines."""
    verdict, crash = tested.verdict, tested.crash
    content: dict[str, Any] = {
        "graph": tested.graph.name,
        "verdict": str(verdict.judgement),
        "lost": verdict.count(Change.LOST),
        "doubled": verdict.count(Change.DOUBLED),
        "changed": verdict.count(Change.CHANGED),
        "faults": [
            {"kind": fault.kind, "what": fault.what, "at_s": fault.at - crash.started} for fault in crash.struck
        ],
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2)

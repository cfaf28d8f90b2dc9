"""A report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from millpy.testing.crash_test.report import ChangedRow, CrashReport

SHOWN = 5


def report_text(report: CrashReport) -> str:
    """Return the report as plain text, worst findings first."""
    return "\n".join(_lines(report))


def _lines(report: CrashReport) -> Iterator[str]:
    yield f"{'PASSED' if report.passed else 'FAILED'}: {report.headline.lower()}. {report.meaning}"
    yield ""
    yield f"  lost {report.lost}, doubled {report.doubled}, changed {report.changed}"
    faults = len(report.faults)
    yield f"  {report.records:,} records, {report.workers} workers, {faults} faults in {report.seconds:.0f} s"
    for kind, spread in report.recovery_by_kind.items():
        yield (
            f"  {kind:<8} {spread.faults:>4} recovered from, median {spread.median_s:.2f} s,"
            f" longest {spread.longest_s:.2f} s"
        )
    yield f"  compared: {', '.join(f'{table.name} ({table.rows:,})' for table in report.tables)}"
    yield from (f"  {complaint}" for complaint in report.complaints)
    if report.differences:
        yield ""
        yield from (f"  {describe(found)}" for found in report.differences[:SHOWN])
        if len(report.differences) > SHOWN:
            yield "  and more: see the report"
    yield from _unsteady(report)
    if report.suspects:
        yield ""
        yield f"  In {report.file}, this can make runs differ:"
        yield from (f"    line {line.line}: {line.code}\n      {line.why}" for line in report.suspects)


def _unsteady(report: CrashReport) -> Iterator[str]:
    for unsteady in report.unsteady:
        yield ""
        what = "which rows there are" if unsteady.rows else ""
        columns = f"column{'s' * (len(unsteady.columns) > 1)} {', '.join(unsteady.columns)}" if unsteady.columns else ""
        yield f"  {unsteady.table}: two runs without faults differ in {' and '.join(filter(None, (columns, what)))}"
        yield from (f"    {describe(found)}" for found in unsteady.examples[:SHOWN])
        yield from (f"    a possible cause: {reason}" for reason in unsteady.reasons)


def describe(found: ChangedRow) -> str:
    """Describe one difference in one line."""
    where = ", ".join(f"{name} {value}" for name, value in found.identity.items())
    if found.expected is None:
        return f"{found.change}: {found.table}: {where}: an unexpected row"
    if found.found is None or not found.columns:
        return f"{found.change}: {found.table}: {where}"
    pairs = ", ".join(f"{name} {found.found[name]} instead of {found.expected[name]}" for name in found.columns)
    return f"{found.change}: {found.table}: {where}: {pairs}"

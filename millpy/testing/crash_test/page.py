"""The report as one self-contained HTML file: inline style, inline SVG, light and dark, no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template

from millpy.testing.crash_test.drawing import glyph, recovery, timeline
from millpy.testing.crash_test.report import ChangedRow, CrashReport, TableResult
from millpy.testing.crash_test.verdict import Judgment

DIFFERENCES_SHOWN = 50
EXAMPLES_SHOWN = 8
TONES = {Judgment.EXACT: "good", Judgment.DIFFERENT: "bad", Judgment.STUCK: "bad", Judgment.UNSTEADY: "doubt"}
STROKES = {"good": "M13 23l7 7l14 -15", "bad": "M15 15l18 18m0 -18l-18 18", "doubt": "M24 13v14m0 7v1"}


def page(report: CrashReport) -> str:
    """Return the whole file."""
    template = Template(files("millpy.testing.crash_test").joinpath("page.html").read_text(encoding="utf-8"))
    tone = TONES[Judgment(report.verdict)]
    return template.substitute(
        title=escape(f"{report.graph}: {report.headline.lower()}"),
        over=_header(report),
        tone=tone,
        icon=_icon(tone),
        headline=escape(report.headline),
        meaning=escape(report.meaning),
        complaints=_list(report.complaints),
        tiles=_tiles(report),
        unsteady=_unsteady(report),
        differences=_differences(report),
        timeline=timeline(report),
        legend=_legend(report),
        lease=f"{report.lease_s:g}",
        recovery=recovery(report) or "<p>No fault was recovered from.</p>",
        tables=_tables(report.tables),
        faults=_faults(report),
        workers=report.workers,
        inputs=escape("; ".join(f"{stream}: {origin}" for stream, origin in report.inputs.items())),
        database=escape(report.database),
        events=escape(", ".join(f"{kind} {count}" for kind, count in report.events.items()) or "none"),
        command=escape(report.command),
    )


def _header(report: CrashReport) -> str:
    words = [
        f"<b>millpy crash-test</b> of graph <b>{escape(report.graph)}</b>",
        escape(report.file),
        report.made_at.strftime("%Y-%m-%d %H:%M UTC"),
        f"seed {report.seed}",
    ]
    return "".join(f"<span>{word}</span>" for word in words)


def _icon(tone: str) -> str:
    return (
        '<svg width="48" height="48" viewBox="0 0 48 48" fill="none" stroke="currentColor" stroke-width="3.5"'
        f' stroke-linecap="round" stroke-linejoin="round" aria-hidden="true"><circle cx="24" cy="24" r="21"/>'
        f'<path d="{STROKES[tone]}"/></svg>'
    )


def _tiles(report: CrashReport) -> str:
    survived = sum(fault.recovered_s is not None for fault in report.faults)
    compared = sum(table.rows for table in report.tables)
    tiles = [(f"{count:,}", what, count > 0) for what, count in _counts(report)]
    tiles += [
        (f"{compared:,}", "rows compared", False),
        (f"{survived}<small> of {len(report.faults)}</small>", "faults recovered from", survived < len(report.faults)),
    ]
    if report.recovery is not None:
        spread = report.recovery
        tiles.append(
            (f"{spread.median_s:.1f}<small> s</small>", f"median recovery, longest {spread.longest_s:.1f} s", False)
        )
    tiles.append((f"{report.records:,}", f"records in {report.seconds:.0f} s", False))
    return "".join(
        f'<div class="tile{" alarm" if alarm else ""}"><div class="figure">{figure}</div>'
        f'<div class="label">{escape(label)}</div></div>'
        for figure, label, alarm in tiles
    )


def _counts(report: CrashReport) -> list[tuple[str, int]]:
    return [("lost", report.lost), ("doubled", report.doubled), ("changed", report.changed)]


def _legend(report: CrashReport) -> str:
    kinds = dict.fromkeys(fault.kind for fault in report.faults)
    entries = [f'<svg viewBox="0 0 16 14">{glyph(kind, 8, 7)}</svg>{kind}' for kind in kinds]
    entries.append('<svg viewBox="0 0 16 14"><path d="M8 2l6 10h-12z" class="take"/></svg>intervals taken over')
    entries.append('<svg viewBox="0 0 16 14"><path d="M0 7h16" class="fed"/></svg>fed')
    entries.append('<svg viewBox="0 0 16 14"><path d="M0 7h16" class="done"/></svg>committed')
    entries.append('<svg viewBox="0 0 16 14"><rect width="16" height="14" class="band"/></svg>recovering')
    return f'<div class="legend">{"".join(f"<span>{entry}</span>" for entry in entries)}</div>'


def _tables(tables: Iterable[TableResult]) -> str:
    rows = []
    for table in tables:
        wrong = table.lost + table.doubled + table.changed
        if wrong:
            word = '<td class="word no">differs</td>'
        elif table.unsteady_rows:
            word = '<td class="word maybe">undecided</td>'
        elif table.unsteady_columns:
            columns = ", ".join(table.unsteady_columns)
            word = f'<td class="word maybe">equal except {escape(columns)}</td>'
        else:
            word = '<td class="word">equal</td>' if table.rows else '<td class="zero">no rows in either</td>'
        counts = "".join(_count(count) for count in (table.lost, table.doubled, table.changed))
        rows.append(f'<tr><td>{escape(table.name)}</td><td class="number">{table.rows:,}</td>{counts}{word}</tr>')
    head = "<th>Table</th>" + "".join(f'<th class="number">{w}</th>' for w in ("Rows", "Lost", "Doubled", "Changed"))
    return f"<table><thead><tr>{head}<th></th></tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _count(count: int) -> str:
    return f'<td class="number {"alarm" if count else "zero"}">{count:,}</td>'


def _faults(report: CrashReport) -> str:
    rows = []
    for fault in report.faults:
        recovery = "not" if fault.recovery_s is None else f"{fault.recovery_s:.2f} s"
        rows.append(
            f'<tr><td class="number">{fault.number}</td><td class="number">{fault.at_s:.1f} s</td>'
            f'<td><span class="dot {fault.kind}"></span>{escape(fault.kind)}</td><td>{escape(fault.what)}</td>'
            f'<td class="number">{"" if fault.worker is None else fault.owned}</td>'
            f'<td class="number{"" if fault.recovery_s is not None else " alarm"}">{recovery}</td></tr>'
        )
    head = (
        '<th class="number">No.</th><th class="number">At</th><th>Kind</th><th>What</th>'
        '<th class="number">Intervals it owned</th><th class="number">Recovered after</th>'
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _differences(report: CrashReport) -> str:
    if not report.differences:
        return ""
    total = report.lost + report.doubled + report.changed
    more = f", the first {DIFFERENCES_SHOWN} here" if total > DIFFERENCES_SHOWN else ""
    return (
        f'<section class="card"><h2>Differences</h2><p class="note">{total:,} rows{more}. Struck-out values are those'
        f" of the run without faults.</p>{_rows(report.differences[:DIFFERENCES_SHOWN])}{_suspects(report)}</section>"
    )


def _unsteady(report: CrashReport) -> str:
    cards = []
    for unsteady in report.unsteady:
        what = ", ".join(f"<code>{escape(column)}</code>" for column in unsteady.columns)
        what = " and ".join(filter(None, (what, "which rows there are" if unsteady.rows else "")))
        examples = _rows(unsteady.examples[:EXAMPLES_SHOWN])
        cards.append(
            f'<section class="card doubtful"><h2>{escape(unsteady.table)}: two runs without faults differ</h2>'
            f'<p class="note">They differ in {unsteady.differences:,} rows, in {what}.</p>'
            f"{examples}{_list(f'A possible cause: {reason}.' for reason in unsteady.reasons)}"
            f"{'' if report.differences else _suspects(report)}</section>"
        )
    return "".join(cards)


def _suspects(report: CrashReport) -> str:
    if not report.suspects:
        return ""
    lines = (f"<b>line {s.line}</b> <code>{escape(s.code)}</code><br>{_ticked(s.why)}" for s in report.suspects)
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<p><br>In <code>{escape(report.file)}</code>, this can make runs differ:</p><ul>{items}</ul>"


def _ticked(text: str) -> str:
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _rows(found: Sequence[ChangedRow]) -> str:
    rows = []
    for difference in found:
        where = ", ".join(f"{escape(name)} <b>{escape(value)}</b>" for name, value in difference.identity.items())
        rows.append(
            f"<tr><td>{escape(difference.change)}</td><td>{escape(difference.table)}</td><td>{where}</td>"
            f'<td class="mono">{_values(difference)}</td></tr>'
        )
    head = "<th></th><th>Table</th><th>Which</th><th>Values</th>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _values(difference: ChangedRow) -> str:
    expected, found = difference.expected, difference.found
    if expected is not None and found is not None and difference.columns:
        return "<br>".join(
            f"{escape(name)} <del>{escape(expected[name])}</del> <ins>{escape(found[name])}</ins>"
            for name in difference.columns
        )
    values = escape(", ".join(f"{name} {value}" for name, value in (found or expected or {}).items()))
    return f"<ins>{values}</ins>" if found is not None else f"<del>{values}</del>"


def _list(items: Iterable[str]) -> str:
    entries = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<ul>{entries}</ul>" if entries else ""

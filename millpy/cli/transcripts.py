"""`millpy test`: run transcripts of windows, and show where the engine differs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import DatabaseOption, JsonOption, handle_errors, print_json, settings_of
from millpy.errors import UsageError
from millpy.observability.status_line import working

if TYPE_CHECKING:
    from millpy.config.settings import Settings
    from millpy.testing.transcripts.run import MakeSubject

ON = ("pure", "columns", "memory", "postgres")
DEFAULT_ON = "pure,columns,memory"


@handle_errors
def test(
    files: Annotated[list[Path], typer.Argument(metavar="FILE.yaml…", help="Files of transcripts.")],
    on: Annotated[
        str, typer.Option("--on", metavar="A,B", help=f"What to run them on; any of: {', '.join(ON)}.")
    ] = DEFAULT_ON,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Run transcripts: windows, input, and the panes that must come out.

    pure and columns are the window step alone, memory and postgres a whole graph.

    Exit status: 0 all passed; 1 one failed; 2 a transcript is wrong, or names what this version cannot do.
    """
    # Imported here: the other commands do not need the engine.
    from millpy.testing.transcripts.reader import read_transcripts
    from millpy.testing.transcripts.report import counts_of, report_document, report_text
    from millpy.testing.transcripts.run import run_transcript

    names = [name.strip() for name in on.split(",") if name.strip()]
    if not names or set(names) - set(ON):
        raise UsageError(f"--on {on!r} is not a list of what to run on", hint=f"choose from: {', '.join(ON)}")
    if database is not None and "postgres" not in names:
        raise UsageError(f"--database has no effect on {', '.join(names)}", hint="add --on postgres")
    settings = settings_of(database, log_level="warning")
    transcripts = [transcript for file in files for transcript in read_transcripts(file)]
    with ExitStack() as stack:
        subjects = _subjects(stack, settings, names)
        stack.enter_context(working(f"running transcripts: {len(transcripts)}"))
        outcomes = [run_transcript(transcript, name, subjects[name]) for transcript in transcripts for name in subjects]
    if as_json:
        print_json(report_document(outcomes))
    else:
        tables.say(report_text(outcomes))
    return 1 if counts_of(outcomes)["failed"] else 0


def _subjects(stack: ExitStack, settings: Settings, names: list[str]) -> dict[str, MakeSubject]:
    """Return what makes each subject; the database of `postgres` is open until `stack` is closed."""
    from millpy.testing.transcripts.run import SUBJECTS

    found = {name: SUBJECTS[name] for name in names if name in SUBJECTS}
    if "postgres" in names:
        from millpy.process.launcher import database as connected
        from millpy.testing.transcripts.postgres_state import postgres_subjects

        url = stack.enter_context(connected(settings, None, create=True))
        found["postgres"] = stack.enter_context(postgres_subjects(url))
    return found

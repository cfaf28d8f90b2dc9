"""`millpy service files`: write alert rules, dashboards, manifests for Kubernetes and a template for systemd."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from millpy.cli import text_table as tables
from millpy.cli.options import JsonOption, handle_errors, print_json
from millpy.errors import UsageError

FILES = (
    "alerts.yaml",
    "kubernetes/api.yaml",
    "kubernetes/kustomization.yaml",
    "kubernetes/migration.yaml",
    "kubernetes/worker.yaml",
    "monitoring/dashboards/overview.json",
    "monitoring/dashboards/sources-and-sinks.json",
    "monitoring/dashboards/windows.json",
    "monitoring/dashboards/workers.json",
    "systemd/millpy@.service",
)


@handle_errors
def files(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where to write; it is made if needed.")],
    as_json: JsonOption = False,
) -> None:
    """Write alert rules, dashboards for Grafana, manifests for Kubernetes and a template for systemd to a directory.

    The files are examples: change them as you like. A file that is there and differs is not overwritten, and nothing is
    written then.
    """
    texts = {name: (source() / name).read_bytes() for name in FILES}
    try:
        differing = [n for n in FILES if (directory / n).exists() and (directory / n).read_bytes() != texts[n]]
        if differing:
            raise UsageError(
                f"{directory / differing[0]} differs from what would be written",
                hint="give another directory, or move it",
            )
        for name, text in texts.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(text)
    except OSError as error:
        raise UsageError(f"cannot write to {directory}: {error}", hint="give a directory of yours") from error
    if as_json:
        print_json({"directory": str(directory), "files": list(FILES)})
        return
    for name in FILES:
        tables.say(f"wrote {directory / name}")
    tables.say("Operations in the documentation says what each needs")


def source() -> Path:
    """Return the directory with the files, in a wheel or a checkout."""
    package = Path(__file__).resolve().parents[1]
    return next(found for root in (package / "_source", package.parent) if (found := root / "compose").is_dir())

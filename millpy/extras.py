"""Optional packages: how to install one that is missing, from where millpy itself came."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def to_install(*extras: str) -> str:
    """The command that installs extras of millpy: from its checkout, wheel or repository, else from an index."""
    named = f"[{','.join(extras)}]"
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{checkout}{named}')}"
    try:
        origin = _origin(distribution("millpy"))
    except PackageNotFoundError:
        origin = ""
    return f"pip install {shlex.quote(f'millpy{named} @ {origin}' if origin else f'millpy{named}')}"


def _origin(installed: Distribution) -> str:
    """Where pip has it from (PEP 610); empty for a package index, and for what is there no more."""
    found = json.loads(installed.read_text("direct_url.json") or "{}")
    url = str(found.get("url", ""))
    if url.startswith("file://") and not Path(url.removeprefix("file://")).exists():
        return ""
    return f"{found['vcs_info']['vcs']}+{url}" if "vcs_info" in found else url

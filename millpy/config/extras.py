"""Commands that install missing optional packages, from the origin of millpy itself."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path


def to_install(*extras: str) -> str:
    """Return the command that installs extras of millpy: from its checkout, wheel or repository, else from an index."""
    named = f"[{','.join(extras)}]"
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{checkout}{named}')}"
    try:
        origin = _origin(distribution("millpy"))
    except PackageNotFoundError:
        origin = ""
    return f"pip install {shlex.quote(f'millpy{named} @ {origin}' if origin else f'millpy{named}')}"


def _origin(installed: Distribution) -> str:
    """Return the origin that pip recorded (PEP 610); empty for a package index, or if the origin no longer exists."""
    found = json.loads(installed.read_text("direct_url.json") or "{}")
    url = str(found.get("url", ""))
    if url.startswith("file://") and not Path(url.removeprefix("file://")).exists():
        return ""
    return f"{found['vcs_info']['vcs']}+{url}" if "vcs_info" in found else url

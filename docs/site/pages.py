"""MkDocs hooks: turn README.md and similar documents into pages, and their links into links between pages.

In a checkout a document links to its neighbors as files (`docs/mqtt.md`, `../benchmarks/README.md`). The site has all
documents in one tree. `repository_of` and `PAGES` translate between the two.
"""

import logging
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks")
ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/README.md": "benchmarks.md",
}
"""Documents outside docs/, and the page that each becomes."""
TEST = re.compile(r'^( *```\w+.*?) test="\w+"', re.MULTILINE)
"""The part of a fence that controls how its block is tested (tests/docs/blocks.py); the renderer does not accept it."""
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/."""
    for document, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages; a folder stands for its README.md."""
    here = page.file.src_uri
    folder = posixpath.dirname(repository_of(here))

    def translated(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        target = PAGES.get(target) or PAGES.get(f"{target}/README.md") or target.removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[2] or ''})"

    return LINK.sub(translated, TEST.sub(r"\1", markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn about a fence that the renderer did not accept; the strict build then fails."""
    if "```" in html:
        log.warning("a code block of '%s' is not rendered as one", page.file.src_uri)
    return html


def repository_of(page: str) -> str:
    """Return the source file of a page, relative to the root of the repository."""
    return next((document for document, name in PAGES.items() if name == page), f"docs/{page}")

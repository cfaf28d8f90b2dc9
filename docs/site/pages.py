"""Hooks of MkDocs: README.md and the like are pages too, and their links lead to pages.

On the disk a document links to its neighbours as files (`docs/mqtt.md`, `../benchmarks/README.md`), so that it reads
well in a checkout; the site has all of them in one tree. `repository_of` and `PAGES` translate between the two.
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
"""Documents outside docs/, by the page that they are."""
TEST = re.compile(r'^( *```\w+.*?) test="\w+"', re.MULTILINE)
"""What a fence says about how its block is tested (tests/docs/blocks.py), which the renderer would not understand."""
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the documents outside docs/."""
    for document, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages; a folder means its README.md."""
    here = page.file.src_uri
    folder = posixpath.dirname(repository_of(here))

    def translated(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        target = PAGES.get(target) or PAGES.get(f"{target}/README.md") or target.removeprefix("docs/")
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{match[2] or ''})"

    return LINK.sub(translated, TEST.sub(r"\1", markdown))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A fence that is still there was not understood: a failure of the strict build."""
    if "```" in html:
        log.warning("a code block of '%s' is not rendered as one", page.file.src_uri)
    return html


def repository_of(page: str) -> str:
    """The file that a page is made of, from the repository's root."""
    return next((document for document, name in PAGES.items() if name == page), f"docs/{page}")

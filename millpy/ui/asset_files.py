"""Scripts, styles and pictures, read once, below an address with their hash: a browser may keep them for ever."""

from __future__ import annotations

import hashlib
from functools import cache
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter, Request, Response

from millpy.api.problems import not_found

PLACE = Path(__file__).parent / "assets"
TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
KEPT = "public, max-age=31536000, immutable"
router = APIRouter(include_in_schema=False)


@cache
def contents() -> dict[str, bytes]:
    """Return the files that are served, by their paths."""
    return {
        path.relative_to(PLACE).as_posix(): path.read_bytes()
        for path in sorted(PLACE.rglob("*"))
        if path.suffix in TYPES
    }


@cache
def digest() -> str:
    """Return the hash of all files. One for all, so that modules can import each other by relative names."""
    parts = [f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in contents().items()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def asset(name: str) -> str:
    """Return the address of a file.

    Raises:
        KeyError: there is none.
    """
    contents()[name]
    return f"/assets/{digest()}/{name}"


@router.get("/assets/{given}/{name:path}", response_class=Response)
async def send_asset(request: Request, given: str, name: str) -> Response:
    """Send a file. A name is looked up among those that were read, and never in the file system."""
    content = contents().get(name)
    if content is None:
        raise not_found("there is no such file")
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {"ETag": tag, "Cache-Control": KEPT if given == digest() else "no-cache"}
    if request.headers.get("If-None-Match") == tag:
        return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=headers)
    return Response(content, headers=headers, media_type=TYPES[Path(name).suffix])

"""A reader of pages without script: it logs in, keeps cookies, and finds tables, links and forms in the HTML."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode, urlsplit

from millpy.ui.values import NONE
from tests.api_server import Answer, ApiServer

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text inside, with each run of white space as one space."""
        return " ".join(self.raw.split())

    @property
    def raw(self) -> str:
        return "".join(child if isinstance(child, str) else child.raw for child in self.children)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Every element inside with this tag and these attributes, in the order of the page."""
        found = []
        for child in self.children:
            if isinstance(child, Element):
                if child.tag == tag and all(child.attributes.get(name) == value for name, value in attributes.items()):
                    found.append(child)
                found += child.all(tag, **attributes)
        return found


class _Tree(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Element("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            opened = self.open.pop()
            assert opened.tag == tag, f"<{opened.tag}> is closed by </{tag}>"

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


class Page:
    """A page: its status, headers, HTML and elements. Tags that are not closed are an error."""

    def __init__(self, answer: Answer) -> None:
        self.status, self.headers, self.html = answer.status, answer.headers, answer.body.decode()
        tree = _Tree()
        tree.feed(self.html)
        tree.close()
        assert tree.open == [tree.root]
        self.root = tree.root

    @property
    def text(self) -> str:
        return self.root.text

    @property
    def main(self) -> Element:
        (found,) = self.root.all("main")
        return found

    def table(self, caption: str) -> list[dict[str, str]]:
        """The rows of a table, by its headings."""
        (found,) = [
            one for one in self.root.all("table") if one.all("caption") and one.all("caption")[0].text == caption
        ]
        head, *rows = found.all("tr")
        names = [cell.text for cell in head.all("th")]
        cells = [[one.text for one in row.children if isinstance(one, Element)] for row in rows]
        return [dict(zip(names, row, strict=True)) for row in cells]


def figure(text: str) -> int | None:
    """The number that a cell shows; None for none."""
    return None if text == NONE else int("".join(text.split()))


class PageClient:
    """A browser without script, for one server."""

    def __init__(self, server: ApiServer) -> None:
        self.server = server
        self.cookies: dict[str, str] = {}

    def send(self, method: str, path: str, fields: Any = None, **headers: str) -> Answer:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookies:
            given["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        body = None
        if fields is not None:
            body = urlencode(fields, doseq=True).encode()
            given["Content-Type"] = "application/x-www-form-urlencoded"
        parts = urlsplit(path)
        connection = self.server.connect()
        try:
            connection.request(method, parts.path + (f"?{parts.query}" if parts.query else ""), body, given)
            response = connection.getresponse()
            answer = Answer(response.status, response.headers, response.read())
        finally:
            connection.close()
        for line in answer.headers.get_all("Set-Cookie", []):
            for name, morsel in SimpleCookie(line).items():
                self.cookies[name] = morsel.value
                if morsel["max-age"] == "0":
                    del self.cookies[name]
        return answer

    def get(self, path: str, **headers: str) -> Page:
        return Page(self.send("GET", path, **headers))

    def log_in(self, token: str, path: str = "/login") -> Answer:
        shown = self.get(path)
        assert shown.status == 200, shown.text
        (form,) = shown.root.all("form")
        fields = {one.attributes["name"]: one.attributes.get("value", "") for one in form.all("input")}
        return self.send("POST", form.attributes["action"], {**fields, "token": token})

    @property
    def csrf(self) -> str:
        (found,) = self.get("/").root.all("meta", name="csrf-token")
        return found.attributes["content"]

"""A MkDocs hook: make a page of the OpenAPI document of the API, so that it cannot differ from what the API serves."""

from collections.abc import Iterator, Mapping
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from millpy.api.app import bare_app

PAGE = "api/http.md"
HEAD = """# Paths of the HTTP API

The API serves this as `/v1/openapi.json`, for programs. [The API](../api-server.md) says who may read and act, how
lists are read page by page, and what is bounded. Each path has its own answer below; refusals are problem details (RFC
9457): 400 for a value that the database cannot read, 401 and 403 for a user without the right, 404, 409 for an action
that was refused and changed nothing, 422 for a parameter out of bounds, 429 after too many failed attempts, 503 while
the database is away or too busy.
"""
INT64_MAX = 2**63 - 1
Schema = Mapping[str, Any]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content="\n".join(lines_of(bare_app().openapi()))))
    return files


def lines_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD
    tag = ""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"\n## {tag.capitalize()}"
            yield f"\n### {method.upper()} `{path}`\n"
            yield operation.get("description", operation["summary"])
            fields = [*_parameters(operation), *_body(document, operation)]
            if fields:
                yield "\n| name | in | value | |\n|---|---|---|---|"
                yield from fields
            for code, answer in operation["responses"].items():
                if code.startswith("2"):
                    yield f"\n{code}: {answer['description'].rstrip('.')}."


def _parameters(operation: Mapping[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        yield _row(parameter["name"], parameter["in"], parameter["schema"], required=parameter.get("required", False))


def _body(document: Mapping[str, Any], operation: Mapping[str, Any]) -> Iterator[str]:
    if "requestBody" not in operation:
        return
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    for name, field in schema["properties"].items():
        yield _row(name, "body", field, required=name in schema.get("required", ()))


def _row(name: str, place: str, schema: Schema, *, required: bool) -> str:
    words = f"{_value(schema)}{'' if required else ', optional'}"
    description = str(schema.get("description", "")).replace("\n", " ")
    return f"| `{name}` | {place} | {words} | {description} |".replace("|  |", "| |")


def _value(schema: Schema) -> str:
    """Return the type of a value and its bounds."""
    if "anyOf" in schema:
        return " or ".join(_value(one) for one in schema["anyOf"] if one.get("type") != "null")
    if schema.get("type") == "array":
        return f"up to {schema['maxItems']:,} × {_value(schema['items'])}"
    words = [str(schema.get("type", "any"))]
    if "enum" in schema:
        words.append(", ".join(f"`{one}`" for one in schema["enum"]))
    if "minimum" in schema:
        words.append(f"at least {schema['minimum']:,.0f}")
    if schema.get("maximum", INT64_MAX) < INT64_MAX:
        words.append(f"at most {schema['maximum']:,.0f}")
    if "maxLength" in schema:
        words.append(f"at most {schema['maxLength']:,} characters")
    if schema.get("default") not in (None, "", False):
        words.append(f"default {schema['default']}")
    return ", ".join(words)

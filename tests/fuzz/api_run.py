"""The API under schemathesis for some minutes: no 5xx, and every answer as its OpenAPI document describes.

`make api-fuzz` installs schemathesis beside the project. An error of the tool itself is shown, and is no failure.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from millpy.admin.tokens import Role
from tests.api_server import ApiServer, running_api
from tests.conformance.test_api import ran
from tests.databases import fresh_database, passing_server

# Not "unsupported_method": it sends a GET with a body where there is only a POST, and that is refused for its body.
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemathesis", required=True, help="the program")
    parser.add_argument("--minutes", type=float, default=5.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millpy-api-") as name, passing_server(Path(name) / "pg") as server:
        directory = Path(name)
        with fresh_database(server) as database:
            ran(directory / "plant", server.url(database))
            with running_api(server.url(database)) as api:
                found = fuzzed(api, str(Path(given.schemathesis).resolve()), given.minutes * 60, directory)
                found["errors_logged"] = sum('"level": "error"' in line for line in api.lines)
    print(json.dumps(found))
    sys.exit(1 if found["failed_runs"] or found["errors_logged"] or not found["requests"] else 0)


def fuzzed(api: ApiServer, program: str, seconds: float, directory: Path) -> dict[str, Any]:
    """Run schemathesis until the time ends, as an admin and as a viewer in turn."""
    tokens = [api.token(f"fuzz {role.name}", role) for role in (Role.ADMIN, Role.VIEWER)]
    ended_at, runs, failed, requests = time.monotonic() + seconds, 0, 0, 0
    while (left_s := int(ended_at - time.monotonic())) > 0:
        command = [
            program, "run", f"{api.url}/v1/openapi.json", "--header", f"Authorization: Bearer {tokens[runs % 2]}",
            "--checks", ",".join(CHECKS), "--exclude-path", "/v1/live", "--max-time", str(min(left_s, 90)),
            "--no-color", "--warnings", "off",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        failures = "= FAILURES =" in done.stdout
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
        runs, failed = runs + 1, failed + failures
        requests += sum(int(number.replace(",", "")) for number in re.findall(r"([\d,]+) generated", done.stdout))
    return {"runs": runs, "failed_runs": failed, "requests": requests}


if __name__ == "__main__":
    main()

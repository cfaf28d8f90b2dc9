"""Make the secrets of the stack, each once: `python compose/make_secrets.py [DIRECTORY]`.

Each secret is one file, as Docker mounts them under /run/secrets. The script closes the directory to others, even an
existing one; the files in it are readable, because each container reads them as a different user. To change a secret,
delete it, run this again, and change it at its server (ALTER ROLE in psql; the broker reads its own at each start).
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

NAMES = frozenset(
    [
        "postgres_password",
        "admin_database_url",
        "worker_database_url",
        "reader_database_url",
        "mqtt_url",
        "fleet_mqtt_url",
        "grafana_password",
    ]
)


def made(directory: Path) -> list[Path]:
    """Write the missing secrets, and return their files.

    Raises:
        SystemExit: the directory belongs to another user or holds other files, so closing it might do harm.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _close(directory)
    admin = secrets.token_hex(24)
    texts = {
        "postgres_password": admin,
        "admin_database_url": f"postgresql://postgres:{admin}@postgres/millpy?sslmode=disable",
        "worker_database_url": f"postgresql://millpy_worker:{secrets.token_hex(24)}@postgres/millpy?sslmode=disable",
        "reader_database_url": f"postgresql://millpy_reader:{secrets.token_hex(24)}@postgres/millpy?sslmode=disable",
        "mqtt_url": f"mqtt://millpy:{secrets.token_hex(24)}@mosquitto:1883",
        "fleet_mqtt_url": f"mqtt://fleet:{secrets.token_hex(24)}@mosquitto:1883",
        "grafana_password": secrets.token_hex(24),
    }
    missing = [directory / name for name in texts if not (directory / name).exists()]
    if (directory / "postgres_password") not in missing:
        texts["admin_database_url"] = (
            f"postgresql://postgres:{(directory / 'postgres_password').read_text()}@postgres/millpy?sslmode=disable"
        )
    for path in missing:  # each whole or not at all: this may be killed, or the disk be full
        whole = path.with_suffix(".new")
        whole.unlink(missing_ok=True)
        whole.write_text(texts[path.name])
        whole.chmod(0o444)
        whole.replace(path)
    return missing


def _close(directory: Path) -> None:
    found = directory.stat()
    if not found.st_mode & 0o077:
        return
    others = sorted(path.name for path in directory.iterdir() if path.name not in NAMES)
    if found.st_uid != os.geteuid() or others:
        what = f"has other files ({others[0]})" if others else "belongs to another user"
        raise SystemExit(f"{directory} is open to others, and {what}: name a separate directory for the secrets")
    directory.chmod(0o700)


if __name__ == "__main__":
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("secrets")
    for path in made(place):
        print(path)

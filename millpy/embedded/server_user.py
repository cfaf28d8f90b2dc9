"""Whom PostgreSQL runs as where we are root: it refuses to be root itself."""

from __future__ import annotations

import os
import pwd
import stat
import sys
from pathlib import Path


def server_user() -> pwd.struct_passwd | None:
    """Whom the server runs as when we are root; None when we are not, and it runs as us."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def as_server_user(command: list[str]) -> list[str]:
    """A command that runs as the server's user: for those who cannot ask for one themselves."""
    entry = server_user()
    if entry is None:
        return command
    code = (
        "import os, sys; g, u = int(sys.argv[1]), int(sys.argv[2]); "
        "os.setgroups([]); os.setgid(g); os.setuid(u); os.execv(sys.argv[3], sys.argv[3:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, str(entry.pw_gid), str(entry.pw_uid), *command]


def give_to_server_user(path: Path) -> None:
    """Make a file or directory the server's."""
    entry = server_user()
    if entry is not None:
        os.chown(path, entry.pw_uid, entry.pw_gid)


def let_through(path: Path) -> None:
    """Let the server's user pass (not list) the directories above its files, where root's own are closed."""
    for directory in (path, *path.parents):
        mode = directory.stat().st_mode
        if not mode & stat.S_IXOTH:
            directory.chmod(mode | stat.S_IXOTH)

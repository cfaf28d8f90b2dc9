"""Pick an unprivileged user for PostgreSQL when we run as root, which PostgreSQL refuses.

Root's directories are often closed to that user (`/root`, directories made by `mkdtemp`), and we must not change their
permissions, because other programs rely on them and may reset them. So the server works without these paths:

    the cluster, the socket's directory    open descriptors, which the server's programs inherit
    the programs                           if in a closed directory, copied once to one that every user can pass
"""

from __future__ import annotations

import os
import pwd
import shutil
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from millpy.errors import ConfigError

PASSABLE_PLACES = ("/var/cache", "/var/tmp", "/tmp")


def server_user() -> pwd.struct_passwd | None:
    """Return the user that the server runs as when we are root; None when we are not, and it runs as our user."""
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def as_server_user(command: list[str]) -> list[str]:
    """Wrap a command so that it runs as the server's user, for callers that cannot set the user of a process."""
    entry = server_user()
    if entry is None:
        return command
    code = (
        "import os, sys; g, u = int(sys.argv[1]), int(sys.argv[2]); "
        "os.setgroups([]); os.setgid(g); os.setuid(u); os.execv(sys.argv[3], sys.argv[3:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, str(entry.pw_gid), str(entry.pw_uid), *command]


def give_to_server_user(path: Path | int) -> None:
    """Make the server's user the owner of a path or an open descriptor."""
    entry = server_user()
    if entry is not None:
        os.chown(path, entry.pw_uid, entry.pw_gid)


def make_own(directory: Path) -> None:
    """Create a directory, with missing parents, that no other user can write to, whatever the umask is.

    A user who can write to it could choose the server that we connect to and the programs that we start.

    Raises:
        ConfigError: the directory exists, and other users may write to it.
    """
    missing = [place for place in (directory, *directory.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(mode=0o700 if place == directory else 0o755, exist_ok=True)
    found = directory.stat()
    if found.st_mode & 0o022 or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"other users may write to {directory}", hint=f"chmod go-w {directory}, or remove it if it is not yours"
        )


def make_servers(directory: Path) -> None:
    """Create a directory that only the server's user can access, possibly below one that every user can write to.

    Raises:
        ConfigError: the path exists and is not a directory of ours or of the server's user.
    """
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found, entry = directory.lstat(), server_user()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), entry.pw_uid if entry else -1):
        raise ConfigError(f"{directory} belongs to another user", hint="remove it, or move the graph to a shorter path")
    directory.chmod(0o700)
    give_to_server_user(directory)


def as_server_names(directory: Path, descriptor: int) -> str:
    """Return the path by which the server's programs reach a directory that they inherit open. As root: Linux only."""
    return str(directory) if server_user() is None else f"/proc/self/fd/{descriptor}"


def is_passable(directory: Path) -> bool:
    """Tell whether every user may pass (not list) a directory and its parents."""
    return all(place.stat().st_mode & stat.S_IXOTH for place in (directory, *directory.parents))


def within_reach(installation: Path) -> Path:
    """Return an installation of PostgreSQL that the server's user can run: the same, or a permanent copy.

    Its programs may need libraries beside the package they are in, as wheels lay them: `package.libs`, which they
    find by a relative path. The copy has both.

    Raises:
        ConfigError: there is no suitable directory for a copy.
    """
    package = installation.parent
    libraries = package.with_name(package.name + ".libs")
    needed = [installation, *([libraries] if libraries.is_dir() else [])]
    if server_user() is None or all(is_passable(part) for part in (installation / "bin", *needed)):
        return installation
    made = (installation / "bin" / "postgres").stat()
    name = f"millpy-{package.name}-{installation.name}-{made.st_dev:x}-{made.st_ino:x}-{made.st_mtime_ns:x}"
    for place in map(Path, (*PASSABLE_PLACES, tempfile.gettempdir())):
        if place.is_dir() and is_passable(place) and os.access(place, os.W_OK):
            return _copied(package.parent, needed, place / name) / package.name / installation.name
    raise ConfigError(
        f"PostgreSQL runs as user {_name()!r}, which cannot access the directories above {installation}",
        hint="run millpy as another user than root, or install it below directories that every user can enter",
    )


def _copied(above: Path, needed: list[Path], copy: Path) -> Path:
    """Copy what is needed below a directory, each at the same place below the copy, unless that was done before."""
    if not copy.exists():
        making = Path(tempfile.mkdtemp(prefix=".millpy-", dir=copy.parent))
        try:
            for part in needed:
                shutil.copytree(part, making / "all" / part.relative_to(above), symlinks=True)
            for path in (making / "all", *(making / "all").rglob("*")):
                if not path.is_symlink():
                    mode = path.stat().st_mode
                    path.chmod(mode & 0o755 | 0o444 | (0o111 if mode & stat.S_IXUSR else 0))
            try:
                (making / "all").rename(copy)
            except OSError:
                if not copy.is_dir():  # otherwise another process was faster
                    raise
        finally:
            shutil.rmtree(making, ignore_errors=True)
    found = copy.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise ConfigError(
            f"{copy} is not owned by root, or others may write to it", hint="remove it; millpy copies PostgreSQL there"
        )
    return copy


def _name() -> str:
    entry = server_user()
    return entry.pw_name if entry is not None else ""

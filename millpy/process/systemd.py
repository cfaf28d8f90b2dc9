"""Units of systemd for `millpy run`: their text, where they live, and which settings go into their environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millpy.errors import UsageError
from millpy.observability.http import address_of
from millpy.process.exit import EXIT_CORRUPT, EXIT_USAGE
from millpy.process.supervisor import STOP_MARGIN_S

MARK = "# Written by `millpy service install`"
STOP_S_MIN = 15.0
"""Seconds beyond the workers' own end before systemd kills what is left."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
HOMES = (Path("/home"), Path("/root"), Path("/run/user"))
EVERY_HOST = {"", "0.0.0.0", "::"}
LOCAL_HOSTS = {"localhost", "127.0.0.1", "::1"}
HIDDEN = (Path("/tmp"), Path("/var/tmp"))
CONFINED = """\
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome={protect_home}
PrivateTmp=yes
PrivateDevices=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
LockPersonality=yes
SystemCallArchitectures=native
CapabilityBoundingSet=
"""
UNIT = """\
{mark}, which replaces it; `millpy service uninstall {name}` removes it.
# Settings and secrets are in {environment}, never in this file.
[Unit]
Description=millpy workers of {name}
{after}StartLimitIntervalSec=0

[Service]
Environment=MILLPY_LOG_FORMAT=json
Environment=ARROW_DEFAULT_MEMORY_POOL=system
EnvironmentFile={dash}{environment}
ExecStart={command}
WorkingDirectory={directory}
Restart=on-failure
RestartSec=5
# A wrong graph or setting, and corrupt data: a restart does not help.
RestartPreventExitStatus={usage} {corrupt}
# The supervisor drains its workers; what is left after TimeoutStopSec is killed.
KillMode=mixed
TimeoutStopSec={stop_s:.0f}
UMask=0077
{identity}{confined}
[Install]
WantedBy={target}
"""


@dataclass(frozen=True, slots=True)
class Service:
    """The workers of a graph as a service of systemd.

    Attributes:
        name: the service's name; the unit is millpy-NAME.service.
        graph: the graph's file.
        program: the words that run millpy.
        workers: the number of worker processes.
        http: the address of health and metrics; empty for none.
        user: whether it is a service of the user's own systemd, which needs no rights.
        run_as: the account of a system service; empty for one that systemd makes up.
        drain_s: seconds that workers give themselves to drain.
        root: where file names begin, for tests.
    """

    name: str
    graph: Path
    program: Sequence[str]
    workers: int
    http: str
    user: bool
    run_as: str
    drain_s: float
    root: Path = Path("/")

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UsageError(
                f"{self.name!r} cannot name a service", hint="use letters, digits, - and _, at most 64: --name plant"
            )
        if not self.user and any(hidden in self.graph.parents for hidden in HIDDEN):
            raise UsageError(
                f"a system service does not see {self.graph}: it has a /tmp of its own",
                hint="move the graph, for example to /etc/millpy/, or use --user",
            )
        for path in (self.graph, *self.program):
            if re.search(r"[\x00-\x1f\x7f]", str(path)):
                raise UsageError(f"a unit cannot name {str(path)!r}: it has a control character", hint="rename it")

    @property
    def unit(self) -> str:
        """The name of the unit."""
        return f"millpy-{self.name}.service"

    def unit_path(self) -> Path:
        """Return the file of the unit."""
        return self._units(user=self.user) / self.unit

    def _units(self, *, user: bool) -> Path:
        return _configuration() / "systemd" / "user" if user else self.root / "etc" / "systemd" / "system"

    def same_address(self) -> Path | None:
        """Return the unit of another service of millpy that would serve at the same address; None without one.

        Raises:
            ConfigError: the address of this one is none.
        """
        if not self.http:
            return None
        address, own = address_of(self.http, "--http"), self.unit_path()
        units = [unit for user in (False, True) for unit in sorted(self._units(user=user).glob("millpy-*.service"))]
        texts = {unit: unit.read_text(errors="replace") for unit in units if unit != own and os.access(unit, os.R_OK)}
        return next((u for u, text in texts.items() if text.startswith(MARK) and _serves_at(text, address)), None)

    def environment_path(self) -> Path:
        """Return the file of its settings and secrets."""
        beneath = _configuration() / "millpy" if self.user else self.root / "etc" / "millpy"
        return beneath / f"{self.name}.env"

    def text(self) -> str:
        """Return the text of the unit."""
        words = [*self.program, "run", str(self.graph), "--workers", str(self.workers)]
        words += ["--http", self.http] if self.http else []
        python = Path(self.program[0])  # an environment outside may have its interpreter at home, behind a link
        at_home = any(home in path.parents for home in HOMES for path in (self.graph, python, python.resolve()))
        identity, confined = "", ""
        if not self.user:
            identity = f"User={self.run_as}\n" if self.run_as else "DynamicUser=yes\n"
            identity += f"StateDirectory=millpy/{self.name}\n"
            confined = CONFINED.format(protect_home="read-only" if at_home else "yes")
        return UNIT.format(
            mark=MARK,
            name=self.name,
            environment=_plain(self.environment_path()),
            # The user's own service may use the embedded database, which needs no settings.
            dash="-" if self.user else "",
            after="" if self.user else "Wants=network-online.target\nAfter=network-online.target postgresql.service\n",
            command=" ".join(map(quoted, words)),
            directory=_plain(self.graph.parent),
            usage=EXIT_USAGE,
            corrupt=EXIT_CORRUPT,
            stop_s=self.drain_s + STOP_MARGIN_S + STOP_S_MIN,
            identity=identity,
            confined=confined,
            target="default.target" if self.user else "multi-user.target",
        )

    def commands(self, *verbs: Sequence[str]) -> list[list[str]]:
        """Return command lines of systemctl for this service's systemd."""
        return [["systemctl", *(["--user"] if self.user else []), *verb] for verb in verbs]


def quoted(word: str) -> str:
    """Return a word of ExecStart as systemd reads it: % and $ stand for themselves when they are doubled."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return escaped if re.fullmatch(r"[A-Za-z0-9@%+=:,./_$-]+", escaped) else f'"{escaped}"'


def _serves_at(text: str, address: tuple[str, int]) -> bool:
    """Return whether the service of a unit listens at an address, or one of the two at every host of its port."""
    found = re.search(r' --http "?(\S*):([0-9]+)"?\n', text)
    if found is None or int(found[2]) != address[1]:
        return False
    hosts = {found[1].strip("[]"), address[0]}
    return len(hosts) == 1 or bool(hosts & EVERY_HOST) or ("localhost" in hosts and hosts <= LOCAL_HOSTS)


def _plain(path: Path) -> str:
    """Return a file name as a setting of its own, which is read to the end of the line."""
    return str(path).replace("%", "%%")


def _configuration() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def environment_text(settings: Mapping[str, str]) -> str:
    """Return a file of settings as EnvironmentFile reads it."""
    lines = []
    for name, value in sorted(settings.items()):
        if "\n" in value or "\0" in value:
            raise UsageError(f"{name} has several lines", hint="write it to the environment file by hand")
        lines.append(f"{name}='{value}'" if "'" not in value else f'{name}="{_escaped(value)}"')
    return "".join(f"{line}\n" for line in lines)


def _escaped(value: str) -> str:
    return re.sub(r'([\\"`$])', r"\\\1", value)


def verify(service: Service) -> str:
    """Return what systemd has against the unit; "" if nothing, or if `systemd-analyze` is not installed."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return ""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / service.unit
        path.write_text(service.text())
        # Not as --user, which needs a session: the settings are the same.
        done = subprocess.run([program, "verify", str(path)], capture_output=True, text=True, check=False, timeout=30)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())


def write_private(path: Path, text: str, mode: int) -> None:
    """Write a file whole or not at all; only its owner can read it if `mode` says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.new")
    made.unlink(missing_ok=True)
    with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    os.chmod(made, mode)
    made.replace(path)

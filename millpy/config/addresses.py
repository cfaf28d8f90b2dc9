"""Names of hosts, and addresses of clients: what counts as one client, whatever form its address comes in."""

from __future__ import annotations

import ipaddress
import re

_NO_NAME = re.compile(r"[\s/\\@?#\[\]]")
CLIENT_BITS = 64
"""An IPv6 client has a whole network of them."""


def is_host_name(name: str) -> bool:
    """Tell whether the system can be asked for a name: Python itself fails for an empty part, as in `.example.org`.

    What has a character of other parts of a URL is none: errors that quote it would quote the password in it.
    """
    try:
        name.encode("idna")
    except UnicodeError:
        return False
    return bool(name) and _NO_NAME.search(name) is None


def ip_address(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a text is, an IPv4 address also when it is mapped to IPv6; None for another text."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def client_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 address."""
    found = ip_address(address)
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((found, CLIENT_BITS), strict=False))
    return address if found is None else str(found)

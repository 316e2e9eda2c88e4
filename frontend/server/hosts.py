"""Restricts the host names that requests may use, against DNS rebinding.

A page of evil.example can let its name resolve to 127.0.0.1. Its requests then reach a server on this machine. To the
browser they go to the page's own site, so origins.py cannot detect them. But their `Host` is still evil.example, and
the page cannot change it.
"""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers

from frontend.errors import Forbidden
from shared.config import FrontendConfig
from shared.config.declaration import words


class Hosts:
    """The accepted host names: those of this machine (localhost, 127.0.0.1, [::1]), and the `allowed` ones."""

    def __init__(self, allowed: Collection[str]) -> None:
        """allowed: names such as api.example.com; *.example.com for all its subdomains; * for all names"""
        names = [name.lower() for name in allowed]
        self._all = "*" in names
        self._names = frozenset(names)
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))

    @classmethod
    def of(cls, config: FrontendConfig) -> "Hosts":
        """Makes the host names of `--allowed-hosts`. Without the flag, some servers accept all names.

        These are servers with API keys, which a foreign page does not have, and servers on an address other than
        loopback, which other machines reach by names that the server does not know.
        """
        open_to_pages = is_loopback(config.host) and not config.keyed
        return cls(words(config.allowed_hosts) or ([] if open_to_pages else ["*"]))

    def check(self, headers: Headers) -> None:
        """Raises Forbidden if the header `Host` names a host that is not accepted. HTTP/1.0 clients may omit it."""
        host = headers.get("host")
        if self._all or host is None:
            return
        name = _name(host)
        if name not in self._names and not name.endswith(self._endings) and not is_loopback(name):
            raise Forbidden(
                "this server does not answer to the name in Host; --allowed-hosts lists the names that may be used",
                code="host_not_allowed",
            )


def is_loopback(name: str) -> bool:
    """Whether a host name, or an address without a port, means the machine itself."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """Returns the name in a `Host` header in lower case, without port and brackets; "" if the header is invalid."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return name if bracket and (not port or (port[0] == ":" and port[1:].isdecimal())) else ""
    name, colon, port = host.partition(":")
    return name.removesuffix(".").lower() if not colon or port.isdecimal() or not port else ""

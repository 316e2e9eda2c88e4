"""Decides who may use the server: API keys, host names, origins of web pages, headers of a gateway, and TLS.

API keys: authenticates requests and names their tenants. Knows headers, but no routes and no limits.

Keys come from settings and from a file. A line of the file holds a key, white space, and the key's name, which is its
tenant in logs, metrics and the queue. Several keys may share a name, such as an old and a new key while clients change
over. `#` begins a comment.
"""

import hashlib
import hmac
import ipaddress
import logging
import os
import re
import ssl
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request

from frontend.errors import BadRequest, Forbidden, Unauthorized
from shared.config.declaration import ConfigError, words
from shared.config.frontend import FrontendConfig
from shared.private_files import is_open_to_others

log = logging.getLogger("sluice.frontend")
KEYS = "sluice.keys"  # key in a request's scope: the ApiKeys
_LINE = re.compile(rb"(?P<key>\S+)(?:\s+(?P<name>[A-Za-z0-9._@:+-]{1,64}))?\s*(?:\s#.*)?")
Names = dict[bytes, tuple[bytes, str]]  # sha256 digest of a key → (the same digest, the key's name)


class ApiKeys:
    """The API keys from settings and from files, which are read again when they change.

    Without any key, requests need no key, and every tenant is "". Keys of administrators may also change the server for
    others: unload models and adapters, empty caches, let it sleep.
    """

    def __init__(self, path: str, keys: Iterable[str] = (), admin_path: str = "") -> None:
        """Reads the files.

        path, admin_path: the files of ordinary keys and of administrators' keys; empty: none
        keys: keys from settings; their names are made from their digests

        Raises ConfigError when a file cannot be read, may be read by others, has no keys, or has an invalid line.
        """
        self._fixed = dict(_named(key.encode("utf-8", "surrogateescape"), "") for key in keys)
        self._ordinary = KeyFile("--api-keys", path) if path else None
        self._admins = KeyFile("--admin-keys", admin_path) if admin_path else None

    def identify(self, headers: Headers) -> str:
        """Returns the name of the request's key, sent as `Authorization: Bearer` or `X-Api-Key`. Raises Unauthorized.

        Keys are looked up and compared by their digests, so that the time this takes reveals nothing about the keys.
        """
        if self._ordinary is None and not self._fixed and self._admins is None:
            return ""
        digest = _digest(headers)
        tables = [self._fixed, *(file.names() for file in (self._ordinary, self._admins) if file is not None)]
        known, name = next((table[digest] for table in tables if digest in table), (b"", ""))
        if hmac.compare_digest(digest, known):
            return name
        if self._ordinary is None and not self._fixed:  # only administrators need keys
            return ""
        raise Unauthorized("the API key is missing or wrong", code="invalid_api_key")

    def administers(self, headers: Headers) -> bool:
        """Whether the request, whose key is valid, may change the server for others (see `check_admin`)."""
        if self._admins is not None:
            return _digest(headers) in self._admins.names()
        tables = [self._fixed, {} if self._ordinary is None else self._ordinary.names()]
        return len({name for table in tables for _, name in table.values()}) <= 1

    def check_admin(self, headers: Headers, what: str, *, keyed: bool = False) -> None:
        """Raises Forbidden unless the request, whose key is valid, may change the server for others.

        Without --admin-keys, a server whose keys all have one name has one tenant, who may do everything; if they have
        several names, nobody may. Without any key, everybody may, unless `keyed` says that strangers must not.

        what: what the request wants to do, for the error
        """
        if keyed and not (self._fixed or self._ordinary or self._admins):
            raise Forbidden(f"{what} needs a server with --api-key, --api-keys or --admin-keys", code="key_needed")
        if not self.administers(headers):
            raise Forbidden(f"{what} changes the server for others and needs a key of --admin-keys", code="admin_only")


def administers(request: Request) -> bool:
    """Does what ApiKeys.administers does for a request."""
    keys: ApiKeys = request.scope[KEYS]
    return keys.administers(request.headers)


def check_admin(request: Request, what: str = "", *, keyed: bool = False) -> None:
    """Does what ApiKeys.check_admin does for a request. what: what it wants to do; empty: its path"""
    keys: ApiKeys = request.scope[KEYS]
    keys.check_admin(request.headers, what or request.url.path, keyed=keyed)


class KeyFile:
    """A file of keys."""

    def __init__(self, flag: str, path: str) -> None:
        """Reads the file. flag: the flag that names it, for messages. Raises ConfigError if it cannot be used."""
        self._flag, self._path = flag, Path(path)
        self._stamp: tuple[int, ...] | None = None
        self._names: Names = {}
        if problem := self._read() or ("" if self._names else "has no keys"):
            raise ConfigError(f"{flag}: {path} {problem}")

    def names(self) -> Names:
        """Returns the keys, after a change those of the changed file."""
        if problem := self._read():
            log.warning("%s: %s %s; the keys stay as they were", self._flag, self._path, problem)
        return self._names

    def _read(self) -> str:
        """Reads the file if it changed. Returns why it cannot be used (the old keys then stay), or "" if it can."""
        try:
            stat = os.stat(self._path)
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size, stat.st_mode)
            if stamp == self._stamp:
                return ""
            self._stamp = stamp
            if is_open_to_others(self._path):
                return "may be read by others (chmod 600 it)"
            self._names = _names(self._path.read_bytes())
        except OSError as error:
            changed, self._stamp = self._stamp != (), ()
            return f"cannot be read: {error.strerror}" if changed else ""
        except ValueError as error:
            return str(error)
        return ""


def _digest(headers: Headers) -> bytes:
    """Returns the SHA-256 digest of the request's key; of an empty key if it has none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()


def _names(content: bytes) -> Names:
    """Parses the file. Raises ValueError, whose text states the number of the line but not its content."""
    names: Names = {}
    for number, line in enumerate(content.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith(b"#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"has no key with a name of letters, digits and . _ @ : + - in line {number}")
        digest, named = _named(match["key"], match["name"].decode() if match["name"] else "")
        names[digest] = named
    return names


def _named(key: bytes, name: str) -> tuple[bytes, tuple[bytes, str]]:
    """Returns an item of Names. A key without a name gets one from its digest."""
    digest = hashlib.sha256(key).digest()
    return digest, (digest, name or f"key-{digest.hex()[:8]}")


# Restricts the host names that requests may use, against DNS rebinding.
#
# A page of evil.example can let its name resolve to 127.0.0.1. Its requests then reach a server on this machine. To
# the browser they go to the page's own site, so the check of origins cannot detect them. But their `Host` is still
# evil.example, and the page cannot change it.


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


# Restricts the web pages that may send requests to the server's own, and those of `--cors-origins`.
#
# A browser lets any page on the internet send requests to a server on localhost. It only keeps the page from reading
# the responses. So this server refuses requests of foreign pages. Browsers state where a request comes from
# (`Sec-Fetch-Site`, `Origin`), and no page can change these headers. Other clients send neither.

LOCALHOST = "localhost"  # in --cors-origins: every page of this machine, on any port
OF_THIS_MACHINE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class Origins:
    """The pages that may send requests. allowed: origins such as https://example.com; localhost; or * for all"""

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self._allows_machine = LOCALHOST in self._allowed

    def check(self, method: str, headers: Headers) -> None:
        """Raises Forbidden if the request comes from a foreign page that is not allowed."""
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if (origin is None and site is None) or not self._allowed.isdisjoint(("*", origin)):
            return
        if self._allows_machine and re.fullmatch(OF_THIS_MACHINE, origin or ""):
            return
        if _is_own(origin, site, headers.get("host", "")) or _is_navigation(method, headers):
            return
        page = f"of {origin}" if origin else "of another site"
        raise Forbidden(
            f"a web page {page} sent this request; --cors-origins lists the origins that may", code="origin_not_allowed"
        )


def _is_own(origin: str | None, site: str | None, host: str) -> bool:
    """Whether the request comes from the server's own page or directly from the user.

    Browsers send `Sec-Fetch-Site` only over https and to localhost. Without it, the origin's host must equal the
    request's `Host`. The origin's scheme may differ, because a proxy may have ended TLS.
    """
    if site is not None:
        return site in ("same-origin", "none")
    return origin is not None and _host_of(origin) == host.lower() != ""


def _host_of(origin: str) -> str:
    """Returns host and port of an origin in lower case; empty if it is no URL."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_navigation(method: str, headers: Headers) -> bool:
    """Whether the user follows a link to this server. The page with the link cannot read the response."""
    return method in ("GET", "HEAD") and headers.get("sec-fetch-mode") == "navigate"


# Reads the tenant and the priority of a request from the headers of an inference gateway (--gateway-headers).
#
# A fairness id becomes part of the request's tenant, and an objective becomes its priority. The headers' names are
# those of llm-d's router and of its predecessor, the Gateway API Inference Extension.

FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
MOST = 2**31 - 1  # the largest priority, the same as in bodies
_ID = re.compile(r"[A-Za-z0-9._@:+-]{1,64}")  # an id has the same form as the name of an API key
_NUMBER = re.compile(r"[+-]?\d{1,10}")
Admission = Callable[[Headers, str], Mapping[str, Any]]  # (headers, name of the API key) → fields of `Admission`


def admission_of(config: FrontendConfig) -> Admission:
    """Returns the function that reads a request's headers. Raises ConfigError for an invalid --objectives."""
    objectives = _objectives(config)
    return GatewayHeaders(objectives).admission if config.gateway_headers else own_tenant


def own_tenant(headers: Headers, tenant: str) -> Mapping[str, Any]:
    """Returns the name of the request's key as its tenant. Used without --gateway-headers, so it ignores headers."""
    return {"tenant": tenant} if tenant else {}


class GatewayHeaders:
    """Reads the headers of a gateway. objectives: priorities by the name of an objective; lower is scheduled first"""

    def __init__(self, objectives: Mapping[str, int]) -> None:
        self._objectives = objectives

    def admission(self, headers: Headers, tenant: str) -> Mapping[str, Any]:
        """Returns the fields of `Admission` that the headers set. Raises BadRequest, which names the header."""
        name, fairness = _given(headers, FAIRNESS)
        if fairness and not _ID.fullmatch(fairness):
            raise BadRequest(
                f"`{name}` must have 1 to 64 of the characters A-Z a-z 0-9 . _ @ : + -", param=name, code="out_of_range"
            )
        priority = self._priority(*_given(headers, OBJECTIVE))
        found = {"tenant": f"{tenant}/{fairness}"} if fairness else own_tenant(headers, tenant)  # key names have no /
        return found if priority is None else {**found, "priority": priority}

    def _priority(self, name: str, objective: str) -> int | None:
        """Returns the priority of an objective. None if there is no objective, or if only the gateway knows its
        name."""
        if not _NUMBER.fullmatch(objective):
            return self._objectives.get(objective)
        if not -MOST - 1 <= (priority := int(objective)) <= MOST:
            raise BadRequest(f"`{name}` must be a number of 32 bits or a name", param=name, code="out_of_range")
        return priority


def _given(headers: Headers, names: tuple[str, ...]) -> tuple[str, str]:
    """Returns the name and value of the first of these headers that a request has; both empty if it has none."""
    return next(((name, headers[name].strip()) for name in names if name in headers), ("", ""))


def _objectives(config: FrontendConfig) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in words(config.objectives):
        name, _, number = entry.rpartition("=")
        if not name or not _NUMBER.fullmatch(number) or not -MOST - 1 <= int(number) <= MOST:
            raise ConfigError(f"--objectives takes NAME=PRIORITY, a number of 32 bits, not {entry!r}")
        found[name] = int(number)
    return found


# Checks the TLS certificate of https:// before any port is opened. uvicorn then serves with it.


def check_tls(config: FrontendConfig) -> None:
    """Checks certificate and key. Raises ConfigError, which says in one sentence what uvicorn would fail on."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if key and not certificate:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile")
    for flag, path in (("--ssl-certfile", certificate), ("--ssl-keyfile", key)):
        try:
            Path(path).read_bytes() if path else b""
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    if not certificate:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key or None, password=_no_password)
    except ssl.SSLError as error:
        flags = "--ssl-certfile and --ssl-keyfile" if key else f"--ssl-certfile {certificate}"
        raise ConfigError(f"{flags} hold no certificate with its key: {error.reason or error}") from error
    flag, secret = ("--ssl-keyfile", key) if key else ("--ssl-certfile", certificate)
    if is_open_to_others(secret):
        raise ConfigError(f"{flag} {secret} has a private key and may be read by others (chmod 600 it)")


def _no_password() -> str:
    raise ConfigError("the key of --ssl-certfile is encrypted, and Sluice cannot ask for its password")

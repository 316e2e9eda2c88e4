"""API keys: authenticates requests and names their tenants. Knows headers, but no routes and no limits.

Keys come from settings and from a file. A line of the file holds a key, white space, and the key's name, which is its
tenant in logs, metrics and the queue. Several keys may share a name, such as an old and a new key while clients change
over. `#` begins a comment.
"""

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request

from frontend.errors import Forbidden, Unauthorized
from shared.config import ConfigError
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

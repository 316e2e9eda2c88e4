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

from frontend.errors import Unauthorized
from shared.config import ConfigError
from shared.private_files import is_open_to_others

log = logging.getLogger("sluice.frontend")

_LINE = re.compile(rb"(?P<key>\S+)(?:\s+(?P<name>[A-Za-z0-9._@:+-]{1,64}))?\s*(?:\s#.*)?")

Names = dict[bytes, tuple[bytes, str]]  # sha256 digest of a key → (the same digest, the key's name)


class ApiKeys:
    """The API keys from settings and from a file, which is read again when it changes.

    Without any key, requests need no key, and every tenant is "".
    """

    def __init__(self, path: str, keys: Iterable[str] = ()) -> None:
        """Reads the file.

        Raises ConfigError when it cannot be read, may be read by others, has no keys, or has an invalid line.

        keys: keys from settings; their names are made from their digests
        """
        self._path = Path(path) if path else None
        self._fixed = dict(_named(key.encode("utf-8", "surrogateescape"), "") for key in keys)
        self._stamp: tuple[int, ...] | None = None
        self._names: Names = {}
        if self._path is not None and (problem := self._read() or ("" if self._names else "has no keys")):
            raise ConfigError(f"--api-keys: {path} {problem}")

    def _read(self) -> str:
        """Reads the file if it changed. Returns why it cannot be used (the old keys then stay), or "" if it can."""
        assert self._path is not None
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

    def identify(self, headers: Headers) -> str:
        """Returns the name of the request's key, sent as `Authorization: Bearer` or `X-Api-Key`. Raises Unauthorized.

        Keys are looked up and compared by their digests, so that the time this takes reveals nothing about the keys.
        """
        if self._path is None and not self._fixed:
            return ""
        if self._path is not None and (problem := self._read()):
            log.warning("--api-keys: %s %s; the keys stay as they were", self._path, problem)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        known, name = self._names.get(digest) or self._fixed.get(digest, (b"", ""))
        if not hmac.compare_digest(digest, known):
            raise Unauthorized("the API key is missing or wrong", code="invalid_api_key")
        return name


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

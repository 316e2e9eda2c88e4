"""The file of API keys: authenticates requests and names their tenants. Knows headers, but no routes and no limits.

A line holds a key, white space, and the name of its tenant in logs, metrics and the queue. Several keys may have one
name, such as an old key and the new one while clients change over. `#` begins a comment.
"""

import hashlib
import hmac
import logging
import os
import re
from pathlib import Path

from starlette.datastructures import Headers

from frontend.errors import Unauthorized
from shared.config import ConfigError

log = logging.getLogger("sluice.frontend")

_LINE = re.compile(rb"(?P<key>\S+)(?:\s+(?P<name>[A-Za-z0-9._@:+-]{1,64}))?\s*(?:\s#.*)?")

Names = dict[bytes, tuple[bytes, str]]  # sha256 of the key → the same digest, and the name


class ApiKeys:
    """The keys in a file, reread when it changes. Without a file no key is needed, and every tenant is ""."""

    def __init__(self, path: str) -> None:
        """Reads the file. Raises ConfigError when it cannot be read, has no keys, or has an invalid line."""
        self._path = Path(path) if path else None
        self._stamp: tuple[int, ...] | None = None
        self._names: Names = {}
        if self._path is not None and (problem := self._read() or ("" if self._names else "has no keys")):
            raise ConfigError(f"--api-keys: {path} {problem}")

    def _read(self) -> str:
        """Reads the file if it changed. Returns why it cannot be used (the keys then stay as they were), else ""."""
        assert self._path is not None
        try:
            stat = os.stat(self._path)
            stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
            if stamp == self._stamp:
                return ""
            self._stamp = stamp
            self._names = _names(self._path.read_bytes())
        except OSError as error:
            changed, self._stamp = self._stamp != (), ()
            return f"cannot be read: {error.strerror}" if changed else ""
        except ValueError as error:
            return str(error)
        return ""

    def identify(self, headers: Headers) -> str:
        """Returns the name of a request's key, sent as `Authorization: Bearer` or `X-Api-Key`. Raises Unauthorized.

        Keys are looked up and compared by their digests, so that the time taken reveals nothing about them.
        """
        if self._path is None:
            return ""
        if problem := self._read():
            log.warning("--api-keys: %s %s; the keys stay as they were", self._path, problem)
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        known, name = self._names.get(digest, (b"", ""))
        if not hmac.compare_digest(digest, known):
            raise Unauthorized("the API key is missing or wrong", code="invalid_api_key")
        return name


def _names(content: bytes) -> Names:
    """Parses the file. Raises ValueError, which names the line but not its content."""
    names: Names = {}
    for number, line in enumerate(content.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith(b"#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"has no key with a name of letters, digits and . _ @ : + - in line {number}")
        digest = hashlib.sha256(match["key"]).digest()
        name = match["name"].decode() if match["name"] else f"key-{digest.hex()[:8]}"
        names[digest] = digest, name
    return names

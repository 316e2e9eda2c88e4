"""A client of any OpenAI-compatible server, on the standard library: model names, and streams of chunks.

Every failure is a `CliError` in the server's own words. To close a stream, or to be interrupted in it, hangs up.
"""

import http.client
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from deploy.supervisor.child_command import CliError

PATIENCE_S = 600.0  # longest silence of a server
BAD_URL = 2


class Server:
    """The server at `url` ("http://127.0.0.1:8000", with or without "/v1"); `key` is its API key, if it wants one."""

    def __init__(self, url: str, key: str = "") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._port = parts.port
        except ValueError as error:
            raise CliError(f"--url {url}: {error}", BAD_URL) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CliError(f"--url {url} is no http:// or https:// address", BAD_URL)
        self.url = url
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def model(self) -> str:
        """The name of the first model that is served."""
        with closing(self._connect()) as connection:
            answer = self._answer(connection, "GET", "models", None)
            listed = _json(self._read(answer)).get("data")
        if not isinstance(listed, list) or not listed:
            raise CliError(f"{self.url} serves no model", 1)
        return str(listed[0]["id"])

    def stream(
        self, route: str, body: Mapping[str, Any], thought: Callable[[str], None] = lambda text: None
    ) -> Iterator[str]:
        """Pieces of text that `route` ("chat/completions", "completions") answers with; `thought` gets what is thought.

        Raises Failure when it is refused, fails on the way, or ends without its end.
        """
        with closing(self._connect()) as connection:
            answer = self._answer(connection, "POST", route, {**body, "stream": True})
            for chunk in self._chunks(answer):
                if "error" in chunk:
                    raise CliError(_words(chunk) or "the server failed", 1)
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if reasoning := delta.get("reasoning_content"):
                        thought(reasoning)
                    yield choice.get("text") or delta.get("content") or ""

    def _connect(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=PATIENCE_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=PATIENCE_S)

    def _answer(
        self, connection: http.client.HTTPConnection, method: str, route: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        try:
            connection.request(method, self._path + route, data, headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"no answer from {self.url}: {_reason(error)}", 1) from error
        if answer.status != 200:
            words = _words(_json(self._read(answer))) or answer.reason
            raise CliError(f"{words} (HTTP {answer.status})", 1)
        return answer

    def _chunks(self, answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Server-sent events, up to the one that says that all is told."""
        while line := self._line(answer):
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield _json(data)
        raise CliError("the server ended the stream before the answer was whole", 1)

    def _line(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.readline()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"{self.url} was lost on the way: {_reason(error)}", 1) from error

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        try:
            return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"{self.url} was lost on the way: {_reason(error)}", 1) from error


def _json(data: bytes) -> dict[str, Any]:
    """What is no JSON object is taken for an error of that text."""
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"error": data.decode(errors="replace").strip()[:500]}


def _words(body: Mapping[str, Any]) -> str:
    """Of OpenAI's error object, of a bare text, or of a framework's own."""
    error = body.get("error") or body.get("detail") or body.get("message") or ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__

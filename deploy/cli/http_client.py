"""A client of OpenAI-compatible servers on the standard library: model names and streamed answers.

Every failure is a `CliError` with the server's own message. Closing or interrupting a stream closes its connection.
"""

import http.client
import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from deploy.launcher.child_command import CliError
from shared.config.flags import Parser

DEFAULT_URL = "http://127.0.0.1:8000"
READ_TIMEOUT_S = 600.0
BAD_URL_EXIT_CODE = 2


def add_key(parser: Parser) -> None:
    """Adds the flag for the API key of a server."""
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("SLUICE_API_KEY", ""),
        help="API key, if the server needs one [SLUICE_API_KEY]",
    )


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """The body of an answer, its headers in lower case, and the time of its first bytes (`time.perf_counter()`)."""

    text: str
    headers: Mapping[str, str]
    first_at: float


def check_letters(parts: SplitResult) -> None:
    """Raises ValueError if a URL has letters that no request can have, or a host that can be no name."""
    (parts.hostname or "").encode("idna")
    rest = parts.path + parts.query
    if not (rest.isascii() and rest.isprintable()) or " " in rest:
        raise ValueError("its path has letters that must be escaped")


class Server:
    """One server.

    url: such as "http://127.0.0.1:8000", with or without "/v1".
    key: API key; empty if the server needs none.
    """

    def __init__(self, url: str, key: str = "") -> None:
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            self._port = parts.port
            check_letters(parts)
        except ValueError as error:
            raise CliError(f"--url {url}: {error}", BAD_URL_EXIT_CODE) from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise CliError(f"--url {url} is not an http:// or https:// address", BAD_URL_EXIT_CODE)
        if not (key.isascii() and key.isprintable()):
            raise CliError("--api-key has a letter that no key may have", BAD_URL_EXIT_CODE)
        self.url = url
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._root = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._sockets = set[socket.socket]()
        self._aborted = False

    def abort(self) -> None:
        """Ends the answers that other threads wait for: these, and all later requests, raise CliError."""
        self._aborted = True
        for one in list(self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def models(self) -> list[str]:
        """Returns all names of the served models. Raises CliError if there is no model or no answer."""
        return [str(model["id"]) for model in self.model_rows()]

    def model_rows(self) -> list[dict[str, Any]]:
        """Returns the objects of /v1/models, each with its `id`. Raises CliError if there is no model or no answer."""
        with self._connection() as connection:
            response = self._request(connection, "GET", "/v1/models", None)
            models = _json(self._read(response)).get("data")
        if not isinstance(models, list) or not models:
            raise CliError(f"{self.url} serves no model", 1)
        if not all(isinstance(model, dict) and "id" in model for model in models):
            raise CliError(f"{self.url} lists models without an id at /v1/models", 1)
        return models

    def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the JSON answer to a POST, for example to "receipts/verify". Raises CliError for a failure."""
        with self._connection() as connection:
            return _json(self._read(self._request(connection, "POST", f"/v1/{route}", body)))

    def stream(
        self,
        route: str,
        body: Mapping[str, Any],
        on_reasoning: Callable[[str], None] = lambda text: None,
        on_finish: Callable[[str], None] = lambda reason: None,
    ) -> Iterator[str]:
        """Yields the pieces of text of an answer.

        route: "chat/completions" or "completions".
        on_reasoning: called with each piece of reasoning.
        on_finish: called with the answer's finish reason, such as "stop" or "length".
        Raises CliError if the request is refused or fails, or if the stream ends early.
        """
        with self._connection() as connection:
            response = self._request(connection, "POST", f"/v1/{route}", {**body, "stream": True})
            for chunk in self._chunks(response):
                if "error" in chunk:
                    raise CliError(_error_message(chunk) or "the server failed", 1)
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    if reasoning := delta.get("reasoning_content"):
                        on_reasoning(reasoning)
                    if reason := choice.get("finish_reason"):
                        on_finish(reason)
                    yield choice.get("text") or delta.get("content") or ""

    def ask(self, path: str, body: Mapping[str, Any]) -> WholeAnswer:
        """Returns the whole answer to a request, even if the answer is streamed. Raises CliError if the request is
        refused."""
        with self._connection() as connection:
            response = self._request(connection, "POST", path, body)
            try:
                first = response.read1()
                first_at = time.perf_counter()
                text = (first + response.read()).decode(errors="replace")
            except (OSError, http.client.HTTPException) as error:
                raise CliError(f"lost the connection to {self.url}: {_reason(error)}", 1) from error
        headers = {name.lower(): value for name, value in response.headers.items()}
        return WholeAnswer(text, headers, first_at)

    def exchange(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes, str]:
        """Returns status, body and request id of the answer to a POST, whatever its status. Raises CliError if there is
        no answer."""
        with self._connection() as connection:
            response = self._sent(connection, "POST", path, body)
            return response.status, self._read(response), response.headers.get("X-Request-Id", "")

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        """Yields a connection, and closes it. Raises CliError if there is none."""
        connection = self._unconnected()
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"no answer from {self.url}: {_reason(error)}", 1) from error
        opened: socket.socket = connection.sock
        self._sockets.add(opened)
        try:
            if self._aborted:
                raise CliError(f"the requests to {self.url} were stopped", 1)
            yield connection
        finally:
            self._sockets.discard(opened)
            connection.close()

    def _unconnected(self) -> http.client.HTTPConnection:
        if self._secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self._host, self._port, timeout=READ_TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=READ_TIMEOUT_S)

    def _request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        response = self._sent(connection, method, path, body)
        if response.status != 200:
            message = _error_message(_json(self._read(response))) or response.reason
            raise CliError(f"{message} (HTTP {response.status})", 1)
        return response

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Mapping[str, Any] | None
    ) -> http.client.HTTPResponse:
        """Sends a request, and returns the response of any status."""
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        try:
            connection.request(method, self._root + path, data, headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"no answer from {self.url}: {_reason(error)}", 1) from error

    def _chunks(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """Yields the JSON objects of server-sent events up to [DONE]."""
        while line := self._line(response):
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield _json(data)
        raise CliError("the server closed the stream before the answer was complete", 1)

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.readline()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"lost the connection to {self.url}: {_reason(error)}", 1) from error

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        try:
            return response.read()
        except (OSError, http.client.HTTPException) as error:
            raise CliError(f"lost the connection to {self.url}: {_reason(error)}", 1) from error


def _json(data: bytes) -> dict[str, Any]:
    """Parses a JSON object; any other text becomes an object whose `error` is that text."""
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"error": data.decode(errors="replace").strip()[:500]}


def _error_message(body: Mapping[str, Any]) -> str:
    """Returns the message of an error: OpenAI's object, plain text, or a web framework's `detail` or `message`."""
    error = body.get("error") or body.get("detail") or body.get("message") or ""
    return str(error.get("message") or error) if isinstance(error, dict) else str(error)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__

"""A hub of our own on 127.0.0.1: the few routes that huggingface_hub asks, over a folder; it notes what was read."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

PIECE = 1 << 16


@dataclass
class Hub:
    """One repository. `refuses`: answers everything with that status and X-Error-Code; `slow`: bytes a second."""

    folder: Path
    name: str = "org/tiny"
    commit: str = "a" * 40
    refuses: tuple[int, str] | None = None
    slow: int = 0
    url: str = ""
    asked: list[str] = field(default_factory=list)  # files, with where each reading began: "model.safetensors@0"

    @cached_property
    def files(self) -> dict[str, bytes]:
        found = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in found}

    @property
    def read(self) -> set[str]:
        return {one.partition("@")[0] for one in self.asked}

    def listing(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files.items()
        ]

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Makes huggingface_hub talk to this hub, without a token, and keep its files in `cache`."""
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", self.url)
        template = self.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.delenv("HF_TOKEN", raising=False)

    @contextmanager
    def serving(self) -> Iterator["Hub"]:
        class Handler(_Handler):
            hub = self

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Clients leave whenever they like."""

        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.refuses is not None:
            return self._send(self.hub.refuses[0], b"{}", {"X-Error-Code": self.hub.refuses[1]})
        path = self.path.partition("?")[0]
        api, files = f"/api/models/{self.hub.name}", f"/{self.hub.name}/resolve/"
        if path.startswith(f"{api}/tree/"):
            return self._send(200, json.dumps(self.hub.listing()).encode())
        if path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.hub.files]
            told = {"id": self.hub.name, "sha": self.hub.commit, "siblings": siblings}
            return self._send(200, json.dumps(told).encode())
        name = path.removeprefix(files).partition("/")[2]
        if not path.startswith(files) or name not in self.hub.files:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        self._file(name)

    def _file(self, name: str) -> None:
        data = self.hub.files[name]
        wanted = self.headers.get("Range", "")
        start = int(wanted.removeprefix("bytes=").partition("-")[0] or 0)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": self.hub.commit}
        if self.command == "GET":
            self.hub.asked.append(f"{name}@{start}")
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if wanted else 200, data[start:], headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        for at in range(0, len(data) if self.command == "GET" else 0, PIECE):
            self.wfile.write(data[at : at + PIECE])
            if self.hub.slow:
                time.sleep(PIECE / self.hub.slow)

"""A local Hugging Face Hub on 127.0.0.1: serves a folder on the routes of huggingface_hub and records downloads."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CHUNK_BYTES = 1 << 16


@dataclass
class Hub:
    """One repository. refusal: status and X-Error-Code of all answers. bytes_per_s: download rate; 0: no limit"""

    folder: Path
    name: str = "org/tiny"
    commit: str = "a" * 40
    refusal: tuple[int, str] | None = None
    bytes_per_s: int = 0
    cuts: list[int] = field(default_factory=list)  # each ends one download of more bytes after so many
    stated: dict[str, str] = field(default_factory=dict)  # file of Git LFS → the SHA-256 that the hub states
    url: str = ""
    downloads: list[str] = field(default_factory=list)  # file and first byte of each download: "model.safetensors@0"

    @cached_property
    def files(self) -> dict[str, bytes]:
        paths = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in paths}

    @property
    def downloaded(self) -> set[str]:
        return {download.partition("@")[0] for download in self.downloads}

    def listing(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = []
        for name, data in self.files.items():
            entry = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            stated = {"oid": self.stated.get(name), "size": len(data), "pointerSize": 134}
            listed.append(entry | ({"lfs": stated} if name in self.stated else {}))
        return listed

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Makes huggingface_hub use this hub, without a token and without pauses before it asks again (23 s after an
        error of a server), and store its files in `cache`."""
        monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda seconds: None))
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
                """Ignores errors of clients that disconnect."""

        with Server(("127.0.0.1", 0), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


@contextmanager
def serving(files: Mapping[str, bytes], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves a repository of these files in folder/repo. huggingface_hub uses this hub and the cache folder/cache."""
    for name, data in files.items():
        path = folder / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with Hub(folder / "repo").serving() as hub:
        hub.use(monkeypatch, folder / "cache")
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.hub.refusal is not None:
            return self._send(self.hub.refusal[0], b"{}", {"X-Error-Code": self.hub.refusal[1]})
        path = self.path.partition("?")[0]
        api, files = f"/api/models/{self.hub.name}", f"/{self.hub.name}/resolve/"
        if path.startswith(f"{api}/tree/"):
            return self._send(200, json.dumps(self.hub.listing()).encode())
        if path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.hub.files]
            model = {"id": self.hub.name, "sha": self.hub.commit, "siblings": siblings}
            return self._send(200, json.dumps(model).encode())
        name = path.removeprefix(files).partition("/")[2]
        if not path.startswith(files) or name not in self.hub.files:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        self._file(name)

    def _file(self, name: str) -> None:
        data = self.hub.files[name]
        byte_range = self.headers.get("Range", "")
        start = int(byte_range.removeprefix("bytes=").partition("-")[0] or 0)
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": self.hub.commit}
        if name in self.hub.stated:
            headers |= {"X-Linked-Etag": f'"{self.hub.stated[name]}"', "X-Linked-Size": str(len(data))}
        if self.command == "GET":
            self.hub.downloads.append(f"{name}@{start}")
        if byte_range:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if byte_range else 200, data[start:], headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and self.hub.cuts and len(data) > self.hub.cuts[0]:
            self.wfile.write(data[: self.hub.cuts.pop(0)])
            self.close_connection = True
            return
        for at in range(0, len(data) if self.command == "GET" else 0, CHUNK_BYTES):
            self.wfile.write(data[at : at + CHUNK_BYTES])
            if self.hub.bytes_per_s:
                time.sleep(CHUNK_BYTES / self.hub.bytes_per_s)

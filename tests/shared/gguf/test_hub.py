"""GGUF files on the hub: only the chosen file is downloaded; an ambiguous name is refused with the choices."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from frontend.text.tokenizer import Tokenizer
from shared.gguf.naming import GgufError
from shared.gguf.translated import TowerFile, check_not_only_gguf, fetch_model, fetch_text, translated
from shared.hf_hub import HubError
from tests.checkpoints import VOCAB
from tests.gguf_files import write
from tests.hub_server import Hub, serving

TOWER = "mmproj-F16.gguf"
FILES = {
    "config.json": b"{}", "Tiny-Q4_K_M.gguf": b"\1" * 1000, "Tiny-Q8_0.gguf": b"\2" * 1000, TOWER: b"\3",
    "gguf/Tiny-BF16-00001-of-00002.gguf": b"\4", "gguf/Tiny-BF16-00002-of-00002.gguf": b"\5",
}  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(FILES, tmp_path, monkeypatch) as hub:
        yield hub


def test_only_the_chosen_file_and_the_tower_beside_it_are_downloaded(hub: Hub) -> None:
    (path,), tower = fetch_model(f"{hub.name}:q4_k_m")
    assert path.read_bytes() == FILES["Tiny-Q4_K_M.gguf"] and tower == TowerFile(path.parent / TOWER, given=False)
    assert hub.downloaded == {"Tiny-Q4_K_M.gguf", TOWER}


def test_no_tower_is_downloaded_if_a_flag_says_so(hub: Hub, tmp_path: Path) -> None:
    assert fetch_model(f"{hub.name}:q4_k_m", mmproj="off")[1] is None
    (tmp_path / "own.gguf").touch()
    own = fetch_model(f"{hub.name}:q4_k_m", mmproj=str(tmp_path / "own.gguf"))[1]
    assert own == TowerFile(tmp_path / "own.gguf", given=True) and hub.downloaded == {"Tiny-Q4_K_M.gguf"}


def test_split_files_are_downloaded_together(hub: Hub) -> None:
    paths, tower = fetch_model(f"{hub.name}:BF16")
    assert [path.read_bytes() for path in paths] == [b"\4", b"\5"] and tower is None, "it lies in another folder"
    assert hub.downloaded == {name for name in FILES if "BF16" in name}


def test_cached_file_needs_no_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = fetch_model(f"{hub.name}:Q8_0")
    hub.downloads.clear()
    hub.commit = "b" * 40
    assert fetch_model(f"{hub.name}:Q8_0", prefer_cache=True) == first and not hub.downloads
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert fetch_model(f"{hub.name}:Q8_0") == first
    with pytest.raises(GgufError, match=r"has no 'Q4_K_M'; it has Q8_0"):
        fetch_model(f"{hub.name}:Q4_K_M")
    with pytest.raises(HubError, match=r"'org/other' is not a folder here, .* cannot be reached"):
        fetch_model("org/other:Q4_K_M")


def test_cache_with_other_files_is_no_obstacle(hub: Hub) -> None:
    fetch_model(f"{hub.name}:Q8_0", prefer_cache=True)
    (path,), _ = fetch_model(f"{hub.name}:Q4_K_M", prefer_cache=True)
    assert path.read_bytes() == FILES["Tiny-Q4_K_M.gguf"]
    (first, second), _ = fetch_model(f"{hub.name}:BF16")
    second.unlink()
    assert fetch_model(f"{hub.name}:BF16", prefer_cache=True)[0] == [first, second] and second.exists()


def test_frontend_fetches_only_the_beginning(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer from the beginning of a file equals the worker's, although no weights are downloaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    path = write("qwen3", tmp_path / "written").file
    (tmp_path / "repo" / "Tiny-Q8_0.gguf").write_bytes(path.read_bytes())
    monkeypatch.setattr("shared.gguf.translated.BEGINNING", 100_000)
    folder = fetch_text(f"{hub.name}:Q8_0")
    assert Tokenizer.load(folder).hash == Tokenizer.load(translated([path], tmp_path / "whole")).hash
    (beginning,) = (tmp_path / "own" / "sluice" / "gguf").glob("*Tiny*.gguf")
    assert beginning.stat().st_size == path.stat().st_size and not beginning.read_bytes()[100_000:].strip(b"\0")
    hub.downloads.clear()
    assert fetch_text(f"{hub.name}:Q8_0") == folder and not hub.downloads
    assert not list((tmp_path / "cache").rglob("*.gguf")), "the hub's cache has no file that is not whole"


@pytest.mark.parametrize("length", [100, 2_000, 9_000])
def test_longer_metadata_needs_the_whole_file(
    length: int, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    path = write("qwen3", tmp_path / "written").file
    (tmp_path / "repo" / "Tiny-Q8_0.gguf").write_bytes(path.read_bytes())
    monkeypatch.setattr("shared.gguf.translated.BEGINNING", length)
    assert Tokenizer.load(fetch_text(f"{hub.name}:Q8_0")).vocab_size == VOCAB
    assert list((tmp_path / "cache").rglob("*.gguf"))


def test_unknown_quantization_lists_what_there_is(hub: Hub) -> None:
    with pytest.raises(GgufError, match=r"'org/tiny' has no 'Q5_0'; it has Q4_K_M, Q8_0, BF16"):
        fetch_model(f"{hub.name}:Q5_0")
    assert not hub.downloads


def test_repository_of_gguf_files_lists_its_quantizations(hub: Hub) -> None:
    with pytest.raises(GgufError, match=r"so say which: org/tiny:NAME, where NAME is one of Q4_K_M, Q8_0, BF16"):
        check_not_only_gguf(hub.name)


def test_refusal_of_the_hub_is_one_sentence(hub: Hub) -> None:
    hub.refusal = 401, "GatedRepo"
    with pytest.raises(HubError, match=r"'org/tiny' is gated"):
        fetch_model(f"{hub.name}:Q4_K_M")

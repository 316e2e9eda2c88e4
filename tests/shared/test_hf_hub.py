"""Downloads from the hub, with a local server. test_checkpoint.py in tests/worker/models/ tests whole checkpoints."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.hf_hub import HubError, fetch
from tests.hub_server import Hub, serving

FILES = {"config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"\1" * 1000, "onnx/config.json": b"{}"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(FILES, tmp_path, monkeypatch) as hub:
        yield hub


def test_fetch_downloads_only_matching_files_and_reports_progress(hub: Hub) -> None:
    progress: list[tuple[int, int]] = []
    folder = fetch(
        hub.name, ["*.json", "*.safetensors"], on_progress=lambda done, total: progress.append((done, total))
    )
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == FILES.keys() - {"onnx/config.json"}
    done, total = progress[-1]
    assert done == total >= 1000


def test_fetch_with_prefer_cache_asks_the_hub_only_once(hub: Hub) -> None:
    first = fetch(hub.name, ["*.json"], prefer_cache=True)
    hub.commit = "b" * 40
    hub.downloads.clear()
    assert fetch(hub.name, ["*.json"], prefer_cache=True) == first and not hub.downloads
    assert fetch(hub.name, ["*.json"]).name == hub.commit


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, "GatedRepo", r"'org/tiny' is gated: accept its terms at .*org/tiny, .* HF_TOKEN"),
        (403, "GatedRepo", r"'org/tiny' is gated"),
        (401, "RepoNotFound", r"no such model, or it is private and needs a token in HF_TOKEN"),
        (404, "RepoNotFound", r"no such model, or it is private"),
        (401, "", r"refuses to show 'org/tiny' \(401\): it needs a token in HF_TOKEN"),
        (404, "RevisionNotFound", r"'org/tiny' has no revision 'v2'"),
        (500, "", r"cannot be reached: .*500"),
    ],
)
def test_refusal_is_one_line_that_says_what_to_do(hub: Hub, status: int, code: str, words: str) -> None:
    hub.refusal = status, code
    with pytest.raises(HubError, match=words) as caught:
        fetch(hub.name, ["*.json"], revision="v2")
    assert "\n" not in str(caught.value)


def test_large_file_with_another_hash_than_the_hub_states_is_refused_and_deleted(hub: Hub, tmp_path: Path) -> None:
    name = "model.safetensors"
    hub.stated[name] = hashlib.sha256(b"what the author uploaded").hexdigest()
    for _ in range(2):  # the second try downloads it again
        with pytest.raises(HubError, match=f"{name} of 'org/tiny' has the SHA-256 .* and the hub states .* deleted"):
            fetch("org/tiny", [name])
    assert hub.downloads.count(f"{name}@0") == 2
    with pytest.raises(HubError, match="reached"):
        hub.refusal = (500, "")
        fetch("org/tiny", [name], prefer_cache=True)


def test_large_file_with_the_stated_hash_is_hashed_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "model.safetensors"
    hub.stated[name] = hashlib.sha256(hub.files[name]).hexdigest()
    folder = fetch("org/tiny", [name])
    assert (folder / name).read_bytes() == hub.files[name]
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", None)
        assert fetch("org/tiny", [name]) == fetch("org/tiny", [name], prefer_cache=True) == folder
    (folder / name).resolve().write_bytes(b"changed in the cache")
    with pytest.raises(HubError, match="deleted"):
        fetch("org/tiny", [name], prefer_cache=True)

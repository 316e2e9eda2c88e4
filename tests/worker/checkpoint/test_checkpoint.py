"""Checkpoints by their hub ids, from a local hub: fetched files, reported progress, and failures."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from shared.hf_hub import fetch
from tests.hub_server import Hub, serving
from worker.checkpoint.checkpoint import Checkpoint, CheckpointError, read_config, resolve

FILES = {
    "config.json": b"{}", "tokenizer.json": b"{ }", "model.safetensors": b"\1" * 400_000, "README.md": b"# Tiny",
    "additional_chat_templates/tool_use.jinja": b"t", "pytorch_model.bin": b"\2", "tiny.gguf": b"\3",
    "consolidated.safetensors": b"\4", "original/params.json": b"{}", "original/consolidated.00.pth": b"\5",
    "onnx/config.json": b"{}",
}  # fmt: skip


NEEDED = {"config.json", "tokenizer.json", "model.safetensors", "additional_chat_templates/tool_use.jinja"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving(FILES, tmp_path, monkeypatch) as hub:
        yield hub


def test_resolve_fetches_only_needed_files_and_reports_bytes(hub: Hub) -> None:
    told: list[tuple[int, int]] = []
    folder = resolve(hub.name, on_progress=lambda done, total: told.append((done, total)))
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == NEEDED and hub.downloaded == NEEDED
    assert folder.name == hub.commit
    done, total = told[-1]
    assert done == total >= 400_000 and all(one <= most for one, most in told)


def test_resolve_offline_uses_a_complete_cached_copy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch(hub.name, ["*.json"])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="only in part"):
        resolve(hub.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    folder = resolve(hub.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve(hub.name) == folder
    with pytest.raises(CheckpointError, match=r"'org/other' is not a folder here, .* cannot be reached"):
        resolve("org/other")


def test_prefer_cache_keeps_the_same_weights(hub: Hub) -> None:
    """Cached files are used although the hub has a newer commit, but an incomplete cache is completed."""
    fetch(hub.name, ["*.json"])
    before = resolve(hub.name, prefer_cache=True)
    assert "model.safetensors" in hub.downloaded
    hub.commit = "b" * 40
    hub.downloads.clear()
    assert resolve(hub.name, prefer_cache=True) == before and not hub.downloads
    assert resolve(hub.name).name == hub.commit


def test_resolve_keeps_to_a_revision(hub: Hub) -> None:
    folder = resolve(hub.name, hub.commit)
    assert folder.name == hub.commit
    hub.commit = "b" * 40
    assert resolve(hub.name, "a" * 40) == folder


def test_interrupted_download_fetches_only_incomplete_files(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def kill(done: int, total: int) -> None:
        if done > 150_000:
            raise Killed

    fetch(hub.name, ["*.json"])
    hub.downloads.clear()
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 50_000)
    with pytest.raises(Killed):
        resolve(hub.name, on_progress=kill)
    assert (resolve(hub.name) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not any(one.startswith(("config", "tokenizer")) for one in hub.downloads)


def test_repository_with_only_gguf_files_lists_them(hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"say which: org/tiny:NAME, where NAME is one of tiny.gguf$"):
        resolve(hub.name)
    with pytest.raises(CheckpointError, match=r"tiny.gguf is not a GGUF file"):
        resolve(f"{hub.name}:tiny")


def test_adapter_is_named(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is an adapter \(LoRA\), not a model"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["tiny.gguf"], "neither model.safetensors nor model.safetensors.index.json, but tiny.gguf"),
        (["config.json", "consolidated.safetensors"], "nor model.safetensors.index.json, but consolidated.safetensors"),
        (["consolidated.safetensors"], "has safetensors, but no config.json"),
        (["pytorch_model.bin"], r"only in Python's pickle format \(pytorch_model.bin\)"),
        (["consolidated.00.pth"], r"only in Python's pickle format \(consolidated.00.pth\)"),
    ],
)
def test_other_weight_formats_are_named(names: list[str], expected: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint(tmp_path)


def sharded(folder: Path, weight_map: dict[str, object]) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/hostname", "sub/a", "", ".", "..", "a\0b", 7, None, ["a"]]
)
def test_weight_map_with_a_path_is_refused(name: object, tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"model.norm.weight": "model-1.safetensors", "lm_head.weight": name})
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert all(word in str(caught.value) for word in ("index.json", "weight_map", "'lm_head.weight'", repr(name)))


def test_weight_map_with_a_link_is_followed(tmp_path: Path) -> None:
    """The cache of the hub consists of links to files in another folder."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir(), folder.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (folder / "model-1.safetensors").symlink_to("../blobs/0123")
    assert Checkpoint(sharded(folder, {"a": "model-1.safetensors"})).names() == ["a"]


def test_folder_with_an_index_of_gguf_files_is_refused(tmp_path: Path) -> None:
    """The index has absolute paths, so only the cache of translated files may contain one."""
    index = {"architecture": "llama", "head_dim": 2, "kv_heads": 1, "files": ["/etc/hostname"], "tensors": {}}
    (tmp_path / "gguf.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"gguf\.json must not exist"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "hf_quant_config.json"])
def test_settings_that_cannot_be_read_are_refused(name: str, tmp_path: Path) -> None:
    if name != "config.json":
        (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read: Is a directory"):
        read_config(tmp_path)


def test_config_nested_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not JSON"):
        read_config(tmp_path)

"""All frontends of a server see the same adapters."""

import json
from pathlib import Path

import pytest

from frontend import lora as module
from frontend.lora import AdapterRegistry, Default, NameTaken, NoSuchAdapter, TooMany, describe
from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.lora import AdapterError, other_base
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.gguf_adapters import write_gguf


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    for index in range(3):
        draw_adapter(checkpoints("llama"), tmp_path / f"a{index}", index, targets=("q_proj",))
    (tmp_path / "run").mkdir()
    return tmp_path


def settings(folder: Path, given: str = "") -> ModelConfig:
    return ModelConfig(model="/base", lora_modules=given, allow_runtime_lora=str(folder))


@pytest.mark.parametrize("shared", [True, False])
def test_adapters_are_added_replaced_and_removed(shared: bool, folder: Path) -> None:
    registry = AdapterRegistry(settings(folder, f"given={folder / 'a0'}"), str(folder / "run") if shared else "")
    assert [*registry.adapters] == ["given"]
    new = describe("x", str(folder / "a1"))
    registry.put(new, replace=False)
    assert registry.adapters["x"] == new
    for name in ("x", "given"):
        with pytest.raises(NameTaken):
            registry.put(describe(name, str(folder / "a2")), replace=False)
    registry.put(describe("given", str(folder / "a2")), replace=True)
    assert registry.adapters["given"].path == str(folder / "a2")
    registry.remove("given")
    registry.remove("x")
    assert not registry.adapters
    with pytest.raises(NoSuchAdapter):
        registry.remove("given")
    registry.put(describe("given", str(folder / "a0")), replace=False)
    assert [*registry.adapters] == ["given"]


def test_what_one_frontend_loads_all_know_and_one_that_starts_later(folder: Path) -> None:
    first, second = (AdapterRegistry(settings(folder), str(folder / "run")) for _ in range(2))
    first.put(describe("a", str(folder / "a0")), replace=False)
    assert second.adapters == first.adapters and [*first.adapters] == ["a"]
    second.put(describe("b", str(folder / "a1")), replace=False)
    first.remove("a")
    later = AdapterRegistry(settings(folder), str(folder / "run"))
    assert [*first.adapters] == [*second.adapters] == [*later.adapters] == ["b"]


def test_all_frontends_know_the_default_adapter_and_its_replacement(folder: Path) -> None:
    first, second = (AdapterRegistry(settings(folder, f"a={folder / 'a0'}"), str(folder / "run")) for _ in range(2))
    assert first.default is second.default is None
    first.set_default(Default("a", 0.5))
    assert second.default is not None and (second.default.path, second.default.scale) == (str(folder / "a0"), 0.5)
    second.put(describe("a", str(folder / "a1")), replace=True)
    assert first.default is not None and (first.default.path, first.default.scale) == (str(folder / "a1"), 0.5)
    with pytest.raises(NoSuchAdapter):
        first.set_default(Default("b", 1.0))
    second.remove("a")
    assert first.default is None


def test_names_that_requests_may_load_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOADED", 2)
    registry = AdapterRegistry(settings(folder), str(folder / "run"))
    for name in ("a", "b"):
        registry.put(describe(name, str(folder / "a0")), replace=False)
    with pytest.raises(TooMany):
        registry.put(describe("c", str(folder / "a0")), replace=False)
    registry.put(describe("b", str(folder / "a1")), replace=True)
    assert [*registry.adapters] == ["a", "b"]


def test_adapters_of_flags_that_cannot_be_used_are_refused(folder: Path) -> None:
    (folder / "a1/adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "use_dora": true}')
    for name, words in (("a1", "use_dora"), ("none", "not a folder")):
        with pytest.raises(ConfigError, match=rf"--lora-modules: the adapter 'a': .*{words}"):
            AdapterRegistry(settings(folder, f"a={folder / name}"))


def test_ranks_of_the_adapters_of_flags_are_checked_where_the_limit_is_known(folder: Path) -> None:
    given = settings(folder, f"a={folder / 'a0'}")
    assert [*AdapterRegistry(given, max_rank=8).adapters] == [*AdapterRegistry(given).adapters] == ["a"]
    with pytest.raises(ConfigError, match=r"the rank 8, above --max-lora-rank 7"):
        AdapterRegistry(given, max_rank=7)


def test_adapter_made_for_another_base_is_served_with_a_warning(
    checkpoints: Checkpoints, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, base in (("one", "org/Base-8B"), ("two", "meta-llama/Llama-3.1-8B"), ("three", "/data/any")):
        draw_adapter(checkpoints("llama"), folder / name, 0, targets=("q_proj",), base_model_name_or_path=base)
    given = " ".join(f"{name}={folder / name}" for name in ("one", "two", "three"))
    registry = AdapterRegistry(settings(folder, given), str(folder / "run"))
    assert [*registry.adapters] == ["one", "two", "three"]
    words = "the adapter 'two' was made for meta-llama/Llama-3.1-8B, not for /base: its answers may make no sense"
    assert [one.getMessage() for one in caplog.records] == [f"--lora-modules: {words}"]


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ("Qwen/Qwen3-8B", False), ("unsloth/qwen3-8b-bnb-4bit", False), ("Qwen/Qwen3", False), ("Qwen/Qwen2-8B", True),
        ("", False), ("/models/Other", False), ("./Other", False), ("Other", False), ("a/b/Other", False),
    ],
)  # fmt: skip
def test_base_is_another_one_only_if_its_name_says_so(base: str, other: bool) -> None:
    assert other_base(base, ("", "/models/Qwen3-8B-AWQ/")) is other


def test_paths_outside_the_allowed_folder_are_refused(folder: Path) -> None:
    with pytest.raises(AdapterError, match="--allow-runtime-lora"):
        AdapterRegistry(settings(folder / "a0")).check_path(str(folder / "a1"))


def test_gguf_files_are_given_by_flags_and_loaded_like_folders(checkpoints: Checkpoints, folder: Path) -> None:
    files = [write_gguf(folder / f"a{index}", checkpoints("llama"), folder / f"a{index}.gguf") for index in range(2)]
    registry = AdapterRegistry(settings(folder, f"given={files[0]}"), str(folder / "run"), max_rank=8)
    registry.check_path(str(files[1]))
    registry.put(describe("new", str(files[1])), replace=False)
    assert [one.path for one in registry.adapters.values()] == [str(file) for file in files]
    with pytest.raises(ConfigError, match="rank 8, above --max-lora-rank 7"):
        AdapterRegistry(settings(folder, f"given={files[0]}"), max_rank=7)


def hostile(folder: Path, patterns: int, modules: int) -> str:
    """Writes an adapter whose patterns match no module, which costs patterns x modules matches."""
    folder.mkdir()
    names = [f"layers.{i}.q.lora_{which}.weight" for i in range(modules) for which in "AB"]
    places = {name: [4 * number, 4 * number + 4] for number, name in enumerate(names)}
    entry = {"dtype": "F32", "shape": [1, 1]}
    header = json.dumps({name: entry | {"data_offsets": place} for name, place in places.items()}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4 * len(names))
    (folder / "adapter_model.safetensors").write_bytes(content)
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "rank_pattern": {f"none.{i}": 1 for i in range(patterns)}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


async def test_hostile_adapter_is_read_in_a_child_with_a_time_limit(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hostile(folder / "slow", 1000, 1500)
    monkeypatch.setattr(module, "SECONDS", 0.01)
    with pytest.raises(AdapterError, match="takes longer than"):
        await module.describe_in_child("x", path)
    monkeypatch.undo()
    described = await module.describe_in_child("x", str(folder / "a1"))
    assert described == (describe("x", str(folder / "a1")), "")
    with pytest.raises(AdapterError, match=r"^\S+ is not a folder with"):
        await module.describe_in_child("x", str(folder / "none"))


def test_more_patterns_than_can_be_matched_in_seconds_are_refused_everywhere(folder: Path) -> None:
    with pytest.raises(AdapterError, match="rank_pattern has 9999 patterns for 300 modules: too many"):
        describe("x", hostile(folder / "endless", 9999, 300))

"""The adapters that flags name, and the folders that may be read."""

import json
from pathlib import Path

import pytest

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.lora import NamedAdapter, named_adapters, path_problem


def of(text: str, **more: str) -> tuple[NamedAdapter, ...]:
    return named_adapters(ModelConfig(model="/base", served_model_name="m", lora_modules=text, **more))


def test_names_and_json_may_be_mixed_and_separated_by_commas_or_spaces() -> None:
    entry = {"name": "my b", "path": "/x/b, c", "base_model_name": "m"}
    found = of(f"a=/x/a, {json.dumps(entry)} c=/x/c")
    assert found == (NamedAdapter("a", "/x/a"), NamedAdapter("my b", "/x/b, c", "m"), NamedAdapter("c", "/x/c"))
    assert of("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a", "NAME=PATH"), ("=x", "NAME=PATH"), ("a=", "NAME=PATH"), ('{"name": "a"', "not JSON"),
        ('{"name": "a"}', "name and path"), ('{"name": 1, "path": "x"}', "name and path"),
        ('{"name": "a", "path": "x", "rank": 3}', "name and path"), ("a=x a=y", "given twice"), ("m=x", "base model"),
        ('{"name": "a", "path": "x", "base_model_name": "other"}', "not served"),
        (json.dumps({"name": "a\n", "path": "x"}), "printable"), (f"{'n' * 257}=x", "256"),
    ],
)  # fmt: skip
def test_malformed_adapters_are_refused_by_the_flag(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"--lora-modules.*{words}"):
        of(text)


def test_only_named_folders_and_those_below_the_allowed_one_may_be_read(tmp_path: Path) -> None:
    below, beside = tmp_path / "allowed" / "a", tmp_path / "allowed-too"
    below.mkdir(parents=True), beside.mkdir()
    (tmp_path / "allowed" / "link").symlink_to(beside)
    closed = ModelConfig(lora_modules=f"given={beside}")
    assert not path_problem(str(beside), closed) and "--allow-runtime-lora" in path_problem(str(below), closed)
    opened = ModelConfig(allow_runtime_lora=str(tmp_path / "allowed"))
    assert not path_problem(str(below), opened)
    for path in (beside, tmp_path / "allowed", tmp_path / "allowed/link", tmp_path / "allowed/../allowed-too", "/etc"):
        assert "is not below" in path_problem(str(path), opened), path
    assert "zero byte" in path_problem(f"{below}\0", opened)

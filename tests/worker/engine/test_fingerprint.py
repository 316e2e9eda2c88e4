"""Which facts change the fingerprint of a worker, and which do not."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.build import fingerprint_of
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.engine.build import load_engine
from worker.engine.numerics import ARITHMETIC_VERSION, choose_formats, fingerprint, numerics_of
from worker.models.config import spec_from_config
from worker.spec import LayerSpec

CPU = torch.device("cpu")
SAME: list[dict[str, Any]] = [
    {"max_batch_size": 3, "max_step_tokens": 64, "prefill_chunk_size": 7, "use_chunked_prefill": False},
    {"page_size": 8, "prefix_cache": False, "kv_cache_gb": 0.001, "kv_cache_backend": "contiguous"},
    {"threads": 1, "speculation": "ngram", "batching_mode": "static", "seed": 5},
]
OTHER: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "int4"},
    {"quantization": "int8"},
]


def of(folder: Path, **settings: Any) -> str:
    worker = WorkerConfig(**{"device": "cpu", "kv_cache_gb": 0.0005, **settings})
    return load_engine(ModelConfig(model=str(folder), max_seq_len=64), worker).fingerprint


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("llama")


@pytest.fixture(scope="module")
def plain(folder: Path) -> str:
    return of(folder)


@pytest.mark.parametrize("settings", SAME)
def test_settings_that_change_no_bit_are_not_in_it(folder: Path, plain: str, settings: dict[str, Any]) -> None:
    assert of(folder, **settings) == plain


@pytest.mark.parametrize("settings", OTHER)
def test_number_formats_are_in_it(folder: Path, plain: str, settings: dict[str, Any]) -> None:
    assert of(folder, **settings) != plain


@needs_library
def test_activations_in_8_bits_are_in_it_if_there_are_weights_in_few_bits(folder: Path, plain: str) -> None:
    assert of(folder, activations="int8") == plain
    float_inputs, int8_inputs = (of(folder, quantization="int4", activations=each) for each in ("float", "int8"))
    assert float_inputs == of(folder, quantization="int4") != int8_inputs


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copied"))


def test_same_checkpoint_in_another_folder_has_the_same(copied: Path, plain: str) -> None:
    assert of(copied) == plain


def test_one_bit_of_one_weight_is_in_it(copied: Path, plain: str) -> None:
    file = copied / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert of(copied) != plain


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu_new"), ("rms_norm_eps", 1e-3), ("eos_token_id", 7)])
def test_config_is_in_it_as_far_as_it_is_used(copied: Path, plain: str, key: str, value: Any) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"_name_or_path": "elsewhere"}))
    assert of(copied) == plain
    (copied / "config.json").write_text(json.dumps(config | {key: value}))
    (copied / "generation_config.json").unlink(missing_ok=True)
    assert of(copied) != plain


def test_tokenizer_and_numerics_are_in_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_config(read_config(folder))
    formats = choose_formats(spec, WorkerConfig(device="cpu"), CPU)
    numerics = numerics_of("c", formats, CPU, batch_invariant=True)
    others = [
        fingerprint(["w"], "other", spec, numerics),
        fingerprint(["w"], "t", spec, replace(numerics, kernels="torch")),
        fingerprint(["w"], "t", spec, replace(numerics, processor="avx2")),
        fingerprint(["w"], "t", spec, replace(numerics, batch_invariant=False)),
        fingerprint(["w"], "t", spec, replace(numerics, libraries={"torch": "0"})),
    ]
    monkeypatch.setattr("worker.engine.numerics.ARITHMETIC_VERSION", -1)
    others.append(fingerprint(["w"], "t", spec, numerics))
    monkeypatch.undo()
    assert len({fingerprint(["w"], "t", spec, numerics), *others}) == 1 + len(others)


@pytest.mark.parametrize("kind", ["lfm2", "granite-hybrid-moe", "qwen3_5"])
def test_one_state_of_all_recurrent_layers_is_a_fact_of_the_model(checkpoints: Checkpoints, kind: str) -> None:
    """The fingerprint is the same as before models could mix kinds of layers, so that older receipts can be checked."""
    folder = checkpoints(kind)
    spec = spec_from_config(read_config(folder))
    numerics = numerics_of("c", choose_formats(spec, WorkerConfig(device="cpu"), CPU), CPU, batch_invariant=True)
    stated = {one.name: value for one in fields(spec) if (value := getattr(spec, one.name)) != one.default}
    (state,) = {layer.state for layer in spec.layers if layer.state is not None}
    names = ("window", "rope", "sparse", "kv_heads", "head_dim", "intermediate_size", "key_is_value", "shares")
    plain = LayerSpec(0, 0)
    stated["layers"] = [
        {"window": layer.window, "rope": layer.rope}
        | {name: value for name in names[2:] if (value := getattr(layer, name)) != getattr(plain, name)}
        | ({"recurrent": True} if layer.recurrent else {})
        for layer in spec.layers
    ]
    before = fingerprint_of([ARITHMETIC_VERSION, ["weights"], "tokenizer", stated | {"recurrent": state}, numerics])
    assert fingerprint(["weights"], "tokenizer", spec, numerics) == before

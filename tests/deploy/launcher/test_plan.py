"""The plan of many models: the flags of each model, sizes from the files, and refusals before any process starts."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from deploy.launcher.many_plan import Plan, plan
from deploy.launcher.many_sizes import GGUF_LAYOUTS, GGUF_SCALES, GIB, PROCESS_BYTES, Kept, weights_bytes
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values
from shared.gguf.container import Container, StoredTensor
from tests.gguf_blocks import random_rows
from tests.gguf_files import write
from worker.checkpoint.stored_weight import Layout
from worker.ops.linear.packed_codes import pack_codes
from worker.quantization.gguf import FORMATS


def planned(text: str, folder: Path, **values: Any) -> Plan:
    file = folder / "models.toml"
    file.write_text(text)
    values = {"models": str(file), "run_dir": str(folder), "device": "cpu", **values}
    return plan(with_values(Settings(), values), values.keys())


def checkpoint(folder: Path, rows: int, dtype: torch.dtype) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.zeros(rows, 8, dtype=dtype)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_each_model_has_its_flags_over_those_of_the_server(tmp_path: Path) -> None:
    checkpoint(tmp_path / "a", 2, torch.bfloat16)
    text = '[models.a]\nmodel="a"\naliases=["x"]\nflags={ "--max-seq-len"=64, page_size=8 }\n[models.b]\nmodel="demo"'
    it = planned(text, tmp_path, threads=3, kv_cache_gb=0.25, max_seq_len=128)
    a, b = (it.worker_settings(entry) for entry in it.entries)
    assert (a.model.max_seq_len, a.worker.page_size, a.worker.threads) == (64, 8, 3)
    assert (b.model.max_seq_len, b.model.names, a.model.names) == (128, ("b",), ("a", "x"))
    assert a.wire.run_dir != b.wire.run_dir
    assert a.model.model == str((tmp_path / "a").resolve())
    assert (a.many, a.worker.kv_cache_gb) == (False, 0.25)


def test_pools_of_all_models_fit_into_the_memory_of_all(tmp_path: Path) -> None:
    it = planned('[models.a]\nmodel="demo"', tmp_path, memory_gb=10.0, max_loaded_models=4)
    assert 0 < 4 * it.worker_settings(it.entries[0]).worker.kv_cache_gb < 10


@pytest.mark.parametrize(("dtype", "flag", "nbytes"), [
    (torch.bfloat16, "auto", 2), (torch.float16, "auto", 4), (torch.float16, "float32", 4),
    (torch.float32, "float32", 4), (torch.float32, "bfloat16", 2),
])  # fmt: skip
def test_size_counts_each_number_as_wide_as_it_will_be(
    tmp_path: Path, dtype: torch.dtype, flag: str, nbytes: int
) -> None:
    checkpoint(tmp_path / "a", 100, dtype)
    it = planned(f'[models.a]\nmodel="a"\nflags={{dtype="{flag}", kv-cache-gb=0.5}}', tmp_path)
    assert it.size_of(it.entries[0]) == 800 * nbytes + GIB // 2 + PROCESS_BYTES


@pytest.mark.parametrize(("flag", "bits"), [("int8", 8.25), ("int4", 4.25), ("int4-g32", 5.0), ("int8-dynamic", 8.25)])
def test_size_counts_linears_with_the_bits_that_they_are_quantized_to(tmp_path: Path, flag: str, bits: float) -> None:
    folder = checkpoint(tmp_path / "a", 100, torch.bfloat16)
    names = ["model.layers.0.mlp.up_proj.weight", "model.layers.0.norm.weight", "model.embed_tokens.weight"]
    tensors = {name: torch.zeros(3, 256, dtype=torch.bfloat16) for name in names}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    it = planned(f'[models.a]\nmodel="a"\nflags={{quantization="{flag}", kv-cache-gb=0.5}}', tmp_path)
    assert it.size_of(it.entries[0]) - GIB // 2 - PROCESS_BYTES == 3 * 3 * 256 * 2 + 3 * 256 * bits / 8, (
        "the head is a copy"
    )


@pytest.mark.parametrize(("dtype", "nbytes"), [("auto", 2), ("float32", 4)])
def test_size_of_a_quantized_checkpoint_that_is_widened_is_never_too_small(
    tmp_path: Path, dtype: str, nbytes: int
) -> None:
    """One byte of the file may hold two codes."""
    folder = checkpoint(tmp_path / "a", 100, torch.bfloat16)
    codes = {"model.layers.0.up_proj.weight": torch.zeros(4, 16, dtype=torch.uint8)}
    save_file(codes, folder / "model.safetensors", {"format": "pt"})
    assert weights_bytes([folder / "model.safetensors"], Kept(dtype)) == 64
    scales = {"model.layers.0.up_proj.weight_scale": torch.zeros(4, 2).to(torch.float8_e4m3fn)}
    save_file(codes | scales, folder / "scaled.safetensors", {"format": "pt"})
    assert weights_bytes([folder / "scaled.safetensors"], Kept(dtype)) == 64 + 8 * 4, "a scale takes up to four bytes"
    assert weights_bytes([folder / "model.safetensors"], Kept(dtype, "none")) == 64 * 2 * nbytes


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("types", ["Q4_0", "Q6_K", "IQ1_S", "F16"])
@pytest.mark.parametrize("flags", [Kept(), Kept("float32"), Kept("float32", "none"), Kept(on_cpu=False)])
def test_size_of_a_gguf_file_counts_the_embedding_as_it_is_kept_and_a_tied_head_besides(
    tmp_path: Path, kind: str, types: str, flags: Kept
) -> None:
    file = write(kind, tmp_path, types).file
    width = 4 if flags.dtype == "float32" or (types == "F16" and flags == Kept()) else 2
    keeps_codes = types != "F16" and flags.quantization != "none"
    tensors, expected = Container.read([file]).tensors, 0
    for tensor in tensors.values():
        plain = math.prod(tensor.shape) * width
        expected += codes_of(tensor, width, flags) if keeps_codes and tensor.type == types else plain
    embedding = tensors["token_embd.weight"]
    numbers = math.prod(embedding.shape) * width
    if keeps_codes:  # a CPU reads the rows of an embedding from the file's own blocks
        expected += kept_of(embedding, tied="output.weight" not in tensors) if flags.on_cpu else numbers
        expected -= codes_of(embedding, width, flags) if "output.weight" in tensors else 0
    elif "output.weight" not in tensors and flags.on_cpu:
        expected += numbers
    assert ("output.weight" in tensors) == (kind == "llama")
    assert weights_bytes([file], flags) == max(file.stat().st_size, expected)


def codes_of(tensor: StoredTensor, width: int, flags: Kept) -> int:
    """Returns the size of a tensor as the worker counts it."""
    form, rows = FORMATS[tensor.type], math.prod(tensor.shape[:-1])
    layout = Layout(form.code_map, form.group_size, form.minimum)
    exact_in_16_bits = tensor.type == "Q4_0"
    return layout.nbytes((rows, tensor.shape[-1]), width if flags.on_cpu or exact_in_16_bits else 4)


def kept_of(embedding: StoredTensor, *, tied: bool) -> int:
    """Returns the size of an embedding of which a CPU keeps the file's blocks, or their scales beside a tied head."""
    form, scales = FORMATS[embedding.type], FORMATS[embedding.type].scales
    if scales is None or not tied:
        return embedding.nbytes
    return math.prod(embedding.shape) // form.numbers * (scales.stop - scales.start)


def test_every_block_format_has_a_size() -> None:
    found = {name: (form.code_map.bits, form.group_size, 1 + form.minimum) for name, form in FORMATS.items()}
    assert {name: row[:3] for name, row in GGUF_LAYOUTS.items()} == found
    scales = {name: (one.numbers, one.scales.stop - one.scales.start) for name, one in FORMATS.items() if one.scales}
    assert scales == GGUF_SCALES


@pytest.mark.parametrize("type", FORMATS)
def test_size_of_a_scale_on_a_gpu_is_its_own(type: str) -> None:
    """Scales of bfloat16 or float16 are exact there, or they take 32 bits."""
    rows = torch.from_numpy(random_rows(64, 256, type, np.random.default_rng(0), 0.05))
    packed = pack_codes(FORMATS[type].quantized_weight(rows))
    assert (4 if packed.narrow is None else 2) <= GGUF_LAYOUTS[type][3]


def test_a_damaged_file_is_told_and_not_believed(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for data in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x08\0\0\0\0\0\0\0" + b'{"a":{}}'):
        file.write_bytes(data)
        with pytest.raises(ValueError, match="safetensors"):
            weights_bytes([file], Kept())


@pytest.mark.parametrize(("text", "values", "words"), [
    ('[models.a]\nmodel="demo"\nflags={port=1}', {}, "'port' is not a flag that one model can have"),
    ('[models.a]\nmodel="demo"\nflags={page-size=0}', {}, "the model a: --page-size must be at least 1"),
    ('[models.a]\nmodel="demo"\nflags={max-prefill-chunks-per-step=2, use-chunked-prefill=false}', {}, "the model a:"),
    ('[models.a]\nmodel="demo"', {"model": "demo"}, "--model cannot be combined"),
    ('[models.a]\nmodel="demo"', {"workers": 2}, "--workers 1"),
    ('[models.a]\nmodel="demo"', {"keep_alive": "soon"}, "--keep-alive must be a duration"),
    ('[models.a]\nmodle="demo"', {}, "modle"),
    ('models=1', {}, "models.toml"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_starts(
    tmp_path: Path, text: str, values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(text, tmp_path, **values)


def test_a_model_that_is_not_here_has_no_size_when_it_is_asked_for(tmp_path: Path) -> None:
    it = planned('[models.a]\nmodel="org/absent"', tmp_path)
    with pytest.raises(OSError, match="org/absent is no checkpoint folder and no GGUF file on this machine"):
        it.size_of(it.entries[0])


def test_frontends_read_the_table_that_the_launcher_wrote(tmp_path: Path) -> None:
    from shared.model_list import read_entries

    it = planned('[models.a]\nmodel="demo"\naliases=["x"]\nflags={page-size=8}\npinned=true', tmp_path)
    settings = it.for_frontends()
    assert tuple(read_entries(Path(settings.models.models))) == it.entries


def from_flags(folder: Path, *models: str, names: str = "", **values: Any) -> Plan:
    values = {"model": ",".join(models), "run_dir": str(folder), "device": "cpu", **values}
    values |= {"served_model_name": names} if names else {}
    settings = with_values(Settings(), values)
    assert settings.many
    return plan(settings, values.keys())


def test_several_models_on_the_command_line_are_a_table(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "tiny", 2, torch.bfloat16)
    it = from_flags(tmp_path, str(folder), "demo")
    assert [(one.name, one.model) for one in it.entries] == [("tiny", str(folder)), ("demo", "demo")]
    named = from_flags(tmp_path, str(folder), "demo", names="x,y", max_seq_len=64)
    assert [one.name for one in named.entries] == ["x", "y"]
    assert named.worker_settings(named.entries[1]).model.names == ("y",)
    assert named.for_frontends().model.several == ()


def test_a_path_with_a_comma_is_one_model(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a,b", 2, torch.bfloat16)
    assert not with_values(Settings(), {"model": str(folder)}).many


@pytest.mark.parametrize(("models", "more", "words"), [
    (("demo", "demo"), {}, "two models are named 'demo'"),
    (("demo", "org/x"), {"names": "one"}, "--served-model-name has 1 different names for 2 models"),
    (("demo", "org/x"), {"lora_modules": "a=b"}, "--lora-modules cannot be combined with several --model"),
    (("demo", "org/x"), {"run_dir": "/" + "x" * 90}, "--run-dir /x+ is too long"),
])  # fmt: skip
def test_mistakes_in_several_models_are_told(
    tmp_path: Path, models: tuple[str, ...], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        from_flags(tmp_path, *models, **more)


def test_the_table_is_read_again_as_it_is_then(tmp_path: Path) -> None:
    it = planned('[models.a]\nmodel="demo"', tmp_path)
    (tmp_path / "models.toml").write_text('[models.b]\nmodel="demo"\nflags={page-size=8}')
    again = it.read_again()
    assert [(one.name, one.flags) for one in again.entries] == [("b", {"page_size": 8})]
    (tmp_path / "models.toml").write_text('[models.b]\nmodel="demo"\nflags={page-size=0}')
    with pytest.raises(ConfigError, match="the model b: --page-size"):
        it.read_again()

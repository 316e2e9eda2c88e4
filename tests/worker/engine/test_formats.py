"""The number formats that a worker chooses, and how Status names them."""

import logging
from dataclasses import replace

import pytest
import torch

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.checkpoint.checkpoint import read_config
from worker.engine import numerics
from worker.engine.build import load_engine
from worker.engine.numerics import choose_formats, dtype_name
from worker.models.config import spec_from_config
from worker.ops.quantized_weight import Scheme
from worker.quantization.methods import AS_STORED, InMemory
from worker.spec import ModelSpec, StoredQuantization


@pytest.mark.parametrize(
    ("stored", "wanted", "computed"),
    [
        (torch.float16, "auto", "float32"),
        (torch.float16, "float16", "float16"),
        (torch.float16, "bfloat16", "bfloat16"),
        (torch.bfloat16, "auto", "bfloat16"),
    ],
)
def test_float16_on_the_cpu_becomes_float32_unless_the_flag_names_it(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, stored: torch.dtype, wanted: str, computed: str
) -> None:
    worker = WorkerConfig(device="cpu", dtype=wanted, kv_cache_gb=0.0005)
    with caplog.at_level(logging.INFO):
        engine = load_engine(ModelConfig(model=str(checkpoints("llama", dtype=stored)), max_seq_len=64), worker)
    assert engine.dtype == computed
    assert ("no C kernels" in caplog.text) == (computed == "float16")


@pytest.mark.parametrize("kept", ["int8", "int4"])
def test_integer_cache_on_a_gpu_is_refused(checkpoints: Checkpoints, kept: str) -> None:
    spec = spec_from_config(read_config(checkpoints("llama")))
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype {kept} is for the CPU: on a GPU, choose fp8 or auto"):
        choose_formats(spec, WorkerConfig(kv_cache_dtype=kept), torch.device("cuda"))


def test_cache_in_four_bits_is_refused_where_keys_are_values(checkpoints: Checkpoints) -> None:
    spec = spec_from_config(read_config(checkpoints("deepseek-v3")))
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype int4 keeps .*\(deepseek_v3\) .*latent attention.*: choose int8"
    ):
        choose_formats(spec, WorkerConfig(kv_cache_dtype="int4"), torch.device("cpu"))


@pytest.mark.parametrize("kind", ["deepseek-v2", "minicpm3"])
def test_latent_attention_on_a_gpu_is_refused(checkpoints: Checkpoints, kind: str) -> None:
    spec = spec_from_config(read_config(checkpoints(kind)))
    with pytest.raises(ConfigError, match=f"--device cuda: this model .{spec.model_type}. has multi-head latent atten"):
        choose_formats(spec, WorkerConfig(device="cuda"), torch.device("cuda"))


def test_activations_in_8_bits_need_the_c_kernels(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    spec, cpu = spec_from_config(read_config(checkpoints("llama"))), torch.device("cpu")
    with pytest.raises(
        ConfigError, match="--activations int8 is for the CPU: on a GPU, choose --quantization int8-dyn"
    ):
        choose_formats(spec, WorkerConfig(activations="int8"), torch.device("cuda"))
    with pytest.raises(ConfigError, match="--activations int8 needs the C kernels, which do not compute float16 here"):
        choose_formats(spec, WorkerConfig(activations="int8", dtype="float16"), cpu)
    with caplog.at_level(logging.INFO):
        assert choose_formats(spec, WorkerConfig(activations="int8"), cpu).memory == AS_STORED
    assert "--activations int8 has no effect: no weights are in few bits" in caplog.text
    with caplog.at_level(logging.INFO):
        formats = choose_formats(spec, WorkerConfig(activations="int8", quantization="int4"), cpu)
    assert formats.memory.int8_inputs and "so are their inputs, to int8 with one scale per 32" in caplog.text
    assert dtype_name(torch.bfloat16, formats.memory) == "bfloat16, int4 weights, int8 activations"


@pytest.mark.parametrize("kept", ["auto", "fp8", "int8", "int4"])
def test_c_kernels_compute_every_cache(checkpoints: Checkpoints, kept: str) -> None:
    spec, cpu = spec_from_config(read_config(checkpoints("llama"))), torch.device("cpu")
    for dtype in ("float32", "float16"):
        formats = choose_formats(spec, WorkerConfig(dtype=dtype, kv_cache_dtype=kept), cpu)
        assert formats.all_in_c == (dtype == "float32")


def test_dtype_name_includes_the_format_of_weights() -> None:
    dynamic = InMemory("fp8", by_row=Scheme("fp8", dynamic=True))
    assert dtype_name(torch.bfloat16, dynamic) == "bfloat16, fp8-dynamic weights"
    assert dtype_name(torch.bfloat16, InMemory("int4")) == "bfloat16, int4 weights"
    assert dtype_name(torch.float16, AS_STORED) == "float16"


@needs_library
@pytest.mark.parametrize("tier", ["avx2", "avx512", "avx512bf16", "amx"])
def test_inputs_of_a_gguf_file_are_rounded_where_that_is_faster(
    tier: str, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cpu = spec_from_config(read_config(checkpoints("llama"))), torch.device("cpu")
    monkeypatch.setattr(numerics.c_library, "tier", lambda: tier)

    def rounds(spec: ModelSpec, **flags: str) -> bool:
        return choose_formats(spec, WorkerConfig(**flags), cpu).memory.int8_inputs

    in_blocks = replace(plain, stored=StoredQuantization("Q4_K_M", activations="blocks"), dtype="bfloat16")
    assert rounds(in_blocks) == (tier == "avx512bf16") and rounds(in_blocks, activations="int8")
    assert not rounds(in_blocks, activations="float")
    assert not numerics._rounds_inputs(in_blocks, AS_STORED, torch.bfloat16, torch.device("cuda"))
    assert not rounds(in_blocks, dtype="float32") and not rounds(in_blocks, quantization="none")
    assert not rounds(replace(in_blocks, stored=StoredQuantization("int4"))) and not rounds(replace(plain, stored=None))

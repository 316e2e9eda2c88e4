"""Eight-bit activations: which checkpoints ask for them, where they are supported, and what accuracy they cost."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.declaration import ConfigError
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, all_logits, cache_for, prompts_of
from worker.checkpoint.checkpoint import read_config
from worker.device import computable
from worker.engine.build import load_engine
from worker.models import load
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.ops.linear.packed import PackedLinear
from worker.ops.quantized_weight import Scheme
from worker.quantization.methods import AS_STORED, InMemory, describe, in_memory, method_of
from worker.spec import StoredQuantization

CUDA = torch.device("cuda")
TOKEN: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}


FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def compressed(inputs: dict[str, Any] | None, type: str = "float") -> dict[str, Any]:
    weights = {"num_bits": 8, "type": type, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": f"{type}-quantized", "config_groups": {"group_0": group}}


WANTED = {
    "none": (compressed(None), "unquantized"),
    "a scale a token": (compressed(TOKEN), "dynamic"),
    "integers, a scale a token": (compressed({**TOKEN, "type": "int"}, "int"), "dynamic"),
    "fixed": (compressed({**TOKEN, "dynamic": False, "strategy": "tensor"}), "other"),
    "a scale a step": (compressed({**TOKEN, "strategy": "tensor"}), "other"),
    "groups": (compressed({**TOKEN, "strategy": "group", "group_size": 128}), "other"),
    "partly fixed": (compressed({**TOKEN, "dynamic": "local"}), "other"),
    "zero points": (compressed({**TOKEN, "type": "int", "symmetric": False}, "int"), "other"),
    "another format than the weights'": (compressed({**TOKEN, "type": "int"}), "other"),
    "four bits": (compressed({**TOKEN, "num_bits": 4}), "other"),
    "fp8, dynamic": (FP8, "dynamic"),
    "fp8, fixed": (FP8 | {"activation_scheme": "static"}, "other"),
    "fp8, blocks": (FP8 | {"weight_block_size": [128, 128]}, "other"),
}


@pytest.mark.parametrize("case", WANTED)
def test_activations_of_a_checkpoint_are_read(case: str) -> None:
    config, wanted = WANTED[case]
    method = method_of({"quantization_config": config})
    assert method is not None and method.stored.activations == wanted


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Returns a function that sets the compute capability that PyTorch reports."""

    def set(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")

    return set


@pytest.mark.parametrize(
    ("name", "capability", "enough"),
    [("fp8", (8, 6), False), ("fp8", (8, 9), True), ("fp8", (9, 0), True), ("int8", (7, 5), False),
     ("int8", (8, 0), True)],
)  # fmt: skip
def test_gpu_too_old_for_dynamic_inputs(
    gpu: Callable[..., None], name: str, capability: tuple[int, int], enough: bool
) -> None:
    """Eight-bit inputs are refused if the flag asks for them. If only the checkpoint asks, inputs are not quantized."""
    gpu(*capability)
    scheme, plain = Scheme.of(f"{name}-dynamic"), Scheme.of(name)
    assert computable(scheme, CUDA, "auto") == (scheme if enough else plain)
    assert computable(plain, CUDA, name) == plain and computable(None, CUDA, "none") is None
    if enough:
        assert computable(scheme, CUDA, str(scheme)) == scheme
        return
    needs = {"fp8": "8.9", "int8": "8.0"}[name]
    with pytest.raises(ConfigError) as caught:
        computable(scheme, CUDA, str(scheme))
    assert str(caught.value) == (
        f"a card has compute capability {capability[0]}.{capability[1]}, and --quantization {name}-dynamic needs "
        f"{needs}: choose --quantization {name}"
    )


def test_cpu_supports_every_scheme() -> None:
    assert computable(Scheme("fp8", dynamic=True), CPU, "fp8-dynamic") == Scheme("fp8", dynamic=True)


BOTH = StoredQuantization("fp8", "a row", True, activations="dynamic")
STAY = "activations, which would be quantized as well, are not"
DYNAMIC = "so are their inputs, one scale per token"


@pytest.mark.parametrize(
    ("stored", "flag", "device", "ending"),
    [
        (BOTH, "fp8-dynamic", CUDA, f"(fp8, one scale for a row) are kept in few bits; {DYNAMIC}"),
        (BOTH, "auto", CUDA, f"are kept in few bits; {DYNAMIC}"),
        (None, "int8-dynamic", CUDA, f"linears are quantized to int8, one scale per row; {DYNAMIC}"),
        (BOTH, "fp8", CUDA, f"are kept in few bits; {STAY}"),
        (None, "fp8", CUDA, "are quantized to fp8, one scale per row"),
        (BOTH, "none", CUDA, f"are dequantized to bfloat16; {STAY}"),
        (BOTH, "auto", CPU, f"are kept in few bits; {STAY}"),
        (None, "fp8-dynamic", CPU, f"are quantized to fp8, one scale per row; {STAY}"),
        (None, "int4", CPU, "linears are quantized to int4, one scale per 128 values"),
        (None, "auto", CPU, ""),
    ],
)  # fmt: skip
def test_describe_names_what_happens_to_activations(
    stored: StoredQuantization | None, flag: str, device: torch.device, ending: str
) -> None:
    text = describe(stored, in_memory(stored, flag, device), torch.bfloat16, flag)
    assert text.endswith(ending) and bool(text) == bool(ending)


def test_cpu_does_not_quantize_activations(checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sluice.load")
    worker = WorkerConfig(device="cpu", kv_cache_gb=0.01, quantization="int8-dynamic")
    engine = load_engine(ModelConfig(model=str(checkpoints("llama"))), worker)
    engine.compiler.close()
    assert engine.dtype == "float32, int8 weights" and STAY in caplog.text


def logits(folder: Path, memory: InMemory) -> Tensor:
    spec = spec_from_config(read_config(folder))
    decoder = Decoder(spec, load.load(folder, spec, torch.float32, CPU, invariant=False, memory=memory), 512)
    (prompt,) = prompts_of([60])
    return all_logits(decoder, cache_for(decoder, tokens=80), [prompt], chunk=60)[0]


@pytest.mark.parametrize(("name", "least"), [("int8-dynamic", 0.995), ("fp8-dynamic", 0.95)])
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma3"])
def test_quantized_activations_keep_logits_close(
    model: str, name: str, least: float, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits are only a little worse than with eight-bit weights alone. Weights stay in eight bits, as on a GPU."""

    def kept(values: Tensor, scale: Tensor, bias: Tensor | None, *, dynamic: bool, **_: object) -> PackedLinear:
        return PackedLinear(values, bias, True, scale=scale, dynamic=dynamic)

    folder, plain = checkpoints(model), in_memory(None, name.removesuffix("-dynamic"), CUDA)
    full, widened = logits(folder, AS_STORED), logits(folder, plain)
    monkeypatch.setattr(load, "pack_quantized", kept)
    got = logits(folder, in_memory(None, name, CUDA))
    likeness = torch.nn.functional.cosine_similarity(got, full)
    assert not torch.equal(got, widened) and likeness.mean() > least
    torch.testing.assert_close(logits(folder, plain), widened, atol=1e-4, rtol=1e-4)

"""Experts in every format and spelling of checkpoints give transformers' logits; broken tensors are named."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.checkpoints import SPARSE, Checkpoints
from tests.worker.models.expert_checkpoints import in_mxfp4, stack_experts
from tests.worker.models.harness import CPU, Oracle, all_logits, cache_for, decoder_of, prompts_of, run_greedy
from tests.worker.models.quantized_checkpoints import (
    EIGHT_BITS,
    FORMATS,
    Format,
    State,
    is_linear,
    rewrite,
    save,
)
from worker.checkpoint.checkpoint import Checkpoint, CheckpointError, read_config
from worker.checkpoint.staging import Staging
from worker.kv_cache.sizing import WeightsSize
from worker.models import load as weights
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.load import FileSource, Loader, load
from worker.models.moe import SPELLINGS, expert_names
from worker.ops.moe.packed import PackedExperts, pack_quantized_experts
from worker.ops.quantized_weight import INT4, INT8, quantize_groups
from worker.quantization.methods import in_memory, method_of

Copy = Callable[..., Path]
ALL = FORMATS | EIGHT_BITS
GREEDY = 100
CUDA = torch.device("cuda")
E = "model.layers.2.mlp.experts."
SCALES, BLOCKS = E + "gate_up_proj_scales", E + "gate_up_proj_blocks"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread, because models this small are slower with several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def copy(checkpoints: Checkpoints, tmp_path: Path) -> Copy:
    return lambda kind, name="copy": Path(shutil.copytree(checkpoints(kind), tmp_path / name))


def logits(folder: Path, flag: str = "auto", device: torch.device = CPU) -> torch.Tensor:
    """Computes logits on the CPU, with weights stored as they would be on `device`."""
    spec = spec_from_config(read_config(folder))
    memory = in_memory(spec.stored, flag, device)
    decoder = Decoder(spec, load(folder, spec, torch.float32, CPU, invariant=False, memory=memory), 512)
    (prompt,) = prompts_of([40])
    return all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=40)[0]


def assert_alike(folder: Path, full: Path) -> None:
    """Asserts that logits and text of a quantized checkpoint equal transformers' with the dequantized weights."""
    (prompt,) = prompts_of([40])
    oracle = Oracle(full)
    torch.testing.assert_close(logits(folder), oracle.logits(prompt), atol=1e-4, rtol=0)
    decoder = decoder_of(folder)
    cache = cache_for(decoder, tokens=len(prompt) + GREEDY + 16)
    (answer,) = run_greedy(decoder, cache, [prompt], GREEDY, chunk=16)
    assert answer == oracle.choices(prompt, answer)


@pytest.mark.parametrize("name", ALL)
def test_format_of_experts_equals_its_dequantized_weights(copy: Copy, name: str) -> None:
    form = ALL[name]
    folder = rewrite(copy("qwen3-moe"), form)
    stored = load_file(folder / "model.safetensors").get("model.layers.0.mlp.experts.0.gate_proj.weight")
    assert stored is None or stored.dtype != torch.float32
    assert_alike(folder, rewrite(copy("qwen3-moe", "full"), form, widened=True))


@pytest.mark.parametrize("name", ["gptq, act-order", "awq", "fp8 a block", "int4 a group, asymmetric"])
@pytest.mark.parametrize("model", ["qwen2-moe", "mixtral"])
def test_published_formats_of_other_families(copy: Copy, name: str, model: str) -> None:
    folder = rewrite(copy(model), ALL[name])
    assert_alike(folder, rewrite(copy(model, "full"), ALL[name], widened=True))


def test_mxfp4_of_gpt_oss_equals_its_dequantized_weights(copy: Copy) -> None:
    folder, full = in_mxfp4(copy("gpt-oss")), in_mxfp4(copy("gpt-oss", "full"), widened=True)
    stored, numbers = (load_file(each / "model.safetensors") for each in (folder, full))
    theirs = convert_moe_packed_tensors(stored[BLOCKS], stored[SCALES], dtype=torch.float32)
    assert torch.equal(theirs, numbers[E + "gate_up_proj"]), "transformers reads these numbers, too"
    assert_alike(folder, full)
    spec = spec_from_config(read_config(folder))
    assert str(spec.stored) == "mxfp4"


def test_stacked_experts_are_those_of_their_own_tensors(copy: Copy, checkpoints: Checkpoints) -> None:
    folder = stack_experts(copy("qwen3-moe"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    assert torch.equal(logits(folder), logits(checkpoints("qwen3-moe")))


@pytest.mark.parametrize(("flag", "code_map"), [("int8", INT8), ("int4", INT4)])
@pytest.mark.parametrize("model", ["qwen2-moe", "mixtral"])
def test_flag_quantizes_experts_but_no_router(
    copy: Copy, checkpoints: Checkpoints, model: str, flag: str, code_map: Any
) -> None:
    form = Format({}, lambda weight: ({}, quantize_groups(weight, code_map, 128).dequantize(torch.float32)))
    got = logits(checkpoints(model), flag)
    torch.testing.assert_close(got, logits(rewrite(copy(model), form, widened=True)), atol=1e-4, rtol=0)
    assert not torch.equal(got, logits(checkpoints(model)))


@pytest.mark.parametrize("name", ["int8 a row", "fp8 a row", "fp8 a tensor", "int8 a group"])
def test_one_scale_for_a_row_is_for_kernels_of_a_gpu(copy: Copy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of a GPU get the stored values and scales of every expert; with finer scales, weights stay in groups."""
    given: list[int] = []

    def seen(*how: Any, count: int, **more: Any) -> PackedExperts:
        given.append(count)
        return pack_quantized_experts(*how, count=count, **more)

    monkeypatch.setattr(weights, "pack_quantized_experts", seen)
    folder = rewrite(copy("qwen3-moe"), EIGHT_BITS[name])
    torch.testing.assert_close(logits(folder, device=CUDA), logits(folder, "none"), atol=1e-4, rtol=0)
    assert given == ([] if name == "int8 a group" else [8] * 4), "two linears of two layers"


def test_stored_router_in_few_bits_is_widened(copy: Copy) -> None:
    form = FORMATS["awq"]

    def too(name: str) -> bool:
        return is_linear(name) or name.endswith("mlp.gate.weight")

    folder = rewrite(copy("qwen3-moe"), form, which=too)
    assert "model.layers.0.mlp.gate.qweight" in load_file(folder / "model.safetensors")
    assert_alike(folder, rewrite(copy("qwen3-moe", "full"), form, widened=True, which=too))


@pytest.mark.parametrize("model", SPARSE)
@pytest.mark.parametrize("flag", ["none", "int4"])
def test_on_size_and_progress_include_experts(checkpoints: Checkpoints, model: str, flag: str) -> None:
    folder = checkpoints(model)
    spec, sizes, seen = spec_from_config(read_config(folder)), list[WeightsSize](), list[tuple[int, int]]()
    load(
        folder, spec, torch.bfloat16, CPU, invariant=False, memory=in_memory(None, flag, CPU), on_size=sizes.append,
        on_progress=lambda *at: seen.append(at),
    )  # fmt: skip
    state = load_file(folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in state.values())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and seen == sorted(seen)
    numbers = {name: tensor.numel() for name, tensor in state.items()}
    stacked = ("experts.gate_up_proj", "experts.down_proj", "put_linear.weight")
    few = sum(count for name, count in numbers.items() if is_linear(name) or name.endswith(stacked))
    assert few > sum(numbers.values()) / 2, "most weights are of experts"
    full = 2 * (sum(numbers.values()) - few)
    nbytes = sizes[0].nbytes
    assert nbytes == full + 2 * few if flag == "none" else full + few / 2 < nbytes < full + few * 0.6


@pytest.mark.parametrize("model", ["gpt-oss", "qwen3-moe"])
def test_experts_are_read_through_staging(copy: Copy, model: str) -> None:
    """Reads weights as for a GPU, in pieces whose borders lie within experts."""
    folder = in_mxfp4(copy(model)) if model == "gpt-oss" else copy(model)
    spec, read = spec_from_config(read_config(folder)), []
    for staging in (None, Staging(CPU, piece=1024, buffers=2)):
        with closing(Checkpoint(folder, staging)) as checkpoint:
            source = FileSource(checkpoint, method_of(read_config(folder)))
            decoder = Decoder(spec, Loader(source, spec, torch.float32, CPU, invariant=False).load(), 64)
            (prompt,) = prompts_of([20])
            read.append(all_logits(decoder, cache_for(decoder, tokens=64), [prompt], chunk=20)[0])
    assert torch.equal(*read)


def test_spelling_is_that_of_most_modules() -> None:
    qwen, mixtral, _, _, gpt_oss, fused, *_ = SPELLINGS
    for one in SPELLINGS:
        modules = [one.router, *(module.format(3) for module in (*one.gate_up, one.down)), *one.of_first]
        assert expert_names(modules) is one
    assert expert_names(["mlp.gate"]) is qwen and expert_names([]) is qwen
    assert expert_names(["block_sparse_moe.gate"]) is mixtral
    assert expert_names(["mlp.router"]) is gpt_oss
    assert expert_names(["mlp.gate", "mlp.experts.0.gate_up_proj"]) is fused
    deeper = expert_names(["router.proj", "moe.experts.0.gate_proj", "moe.experts.0.up_proj"])
    assert deeper.down == "moe.experts.{}.down_proj", "as some exports of Gemma 4 name their experts"


LIES: list[tuple[str, str, Callable[[State], Any], list[str]]] = [
    ("qwen3-moe", "missing", lambda s: s.pop(E + "5.up_proj.weight"), [E + "5.up_proj.weight", "missing"]),
    ("qwen3-moe", "misshaped", lambda s: s.update({E + "5.up_proj.weight": s[E + "5.up_proj.weight"][:-1]}),
     [E + "5.up_proj.weight", "[95, 64]", "[96, 64]"]),
    ("qwen3-moe", "one too many", lambda s: s.update({E + "8.up_proj.weight": torch.ones(96, 64)}),
     [E + "8.up_proj.weight", "does not belong"]),
    ("qwen3-moe", "router too small", lambda s: s.update({"model.layers.2.mlp.gate.weight": torch.ones(7, 64)}),
     ["model.layers.2.mlp.gate.weight", "[7, 64]", "[8, 64]"]),
    ("qwen3-moe", "no router", lambda s: s.pop("model.layers.0.mlp.gate.weight"),
     ["model.layers.0.mlp.gate.weight", "missing"]),
    ("qwen3-moe", "router of a dense layer", lambda s: s.update({"model.layers.1.mlp.gate.weight": torch.ones(8, 64)}),
     ["model.layers.1.mlp.gate.weight", "does not belong"]),
    ("qwen2-moe", "no shared expert", lambda s: s.pop("model.layers.1.mlp.shared_expert.up_proj.weight"),
     ["shared_expert.up_proj.weight", "missing"]),
    ("qwen2-moe", "no shared gate", lambda s: s.pop("model.layers.1.mlp.shared_expert_gate.weight"),
     ["shared_expert_gate.weight", "missing"]),
    ("mixtral", "missing", lambda s: s.pop("model.layers.0.block_sparse_moe.experts.0.w3.weight"),
     ["model.layers.0.block_sparse_moe.experts.0.w3.weight", "missing"]),
    ("gpt-oss", "no sinks", lambda s: s.pop("model.layers.0.self_attn.sinks"), ["self_attn.sinks", "missing"]),
    ("gpt-oss", "sinks of too few heads", lambda s: s.update({"model.layers.0.self_attn.sinks": torch.ones(3)}),
     ["self_attn.sinks", "[3]", "[4]"]),
    ("gpt-oss", "an expert too few", lambda s: s.update({E + "down_proj": s[E + "down_proj"][:-1]}),
     [E + "7.down_proj", "missing"]),
    ("gpt-oss", "an expert too many", lambda s: s.update({E + "down_proj_bias": torch.ones(9, 64)}),
     [E + "8.down_proj.bias", "does not belong"]),
    ("gpt-oss", "not transposed", lambda s: s.update({E + "gate_up_proj": s[E + "gate_up_proj"].mT}),
     [E + "0.gate_up_proj", "[192, 64]", "[64, 192]"]),
    ("gpt-oss", "no experts", lambda s: [s.pop(name) for name in list(s) if ".experts." in name],
     [".experts.0.", "missing"]),
    ("gpt-oss", "a number for all experts", lambda s: s.update({E + "down_proj_bias": torch.ones(64)}),
     [E, "down_proj", "bias"]),
    ("gpt-oss", "no router's bias", lambda s: s.pop("model.layers.2.mlp.router.bias"), ["mlp.router.bias", "missing"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "change", "words"), [(model, change, words) for model, _, change, words in LIES],
                         ids=[f"{model}: {name}" for model, name, *_ in LIES])  # fmt: skip
def test_wrong_expert_is_named(copy: Copy, model: str, change: Callable[[State], Any], words: list[str]) -> None:
    folder = copy(model)
    state: State = load_file(folder / "model.safetensors")
    change(state)
    save(folder, state)
    with pytest.raises(CheckpointError) as caught:
        logits(folder)
    assert all(word in str(caught.value) for word in [*words, str(folder)]), caught.value
    assert "\n" not in str(caught.value)


STACKED_LIES: list[tuple[Callable[[State], Any], list[str]]] = [
    (lambda s: s.pop(SCALES), [E + "0.gate_up_proj", "scales", "missing"]),
    (lambda s: s.pop(BLOCKS), [E + "0.gate_up_proj", "missing"]),
    (lambda s: s.update({SCALES: s[SCALES][..., :-1]}), [E + "0.gate_up_proj", "scales", "[192, 1]", "[192, 2]"]),
    (lambda s: s.update({BLOCKS: s[BLOCKS][:, :-1]}), [E + "0.gate_up_proj", "blocks", "[191, 2, 16]", "[192, 2, 16]"]),
    (lambda s: s.update({SCALES: s[SCALES].index_fill(0, torch.tensor([6]), 255)}), [E + "6.gate_up", "not finite"]),
    (lambda s: s.update({SCALES: s[SCALES].char()}), [E + "0.gate_up_proj", "I8", "U8"]),
]


@pytest.mark.parametrize(("change", "words"), STACKED_LIES)
def test_wrong_mxfp4_experts_are_named(copy: Copy, change: Callable[[State], Any], words: list[str]) -> None:
    folder = in_mxfp4(copy("gpt-oss"))
    state: State = load_file(folder / "model.safetensors")
    change(state)
    save(folder, state)
    with pytest.raises(CheckpointError) as caught:
        logits(folder)
    assert all(word in str(caught.value) for word in [*words, str(folder)]), caught.value
    assert "\n" not in str(caught.value)

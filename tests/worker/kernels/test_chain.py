"""The decoder's loop through the Triton kernels, attention apart: that they fit together, and change nothing."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config import WorkerConfig
from tests.worker.kernels.harness.cases import TRITON_DTYPES, close, random
from tests.worker.model.harness import Row, pack
from worker.kernels.linear import PackedLinear
from worker.kernels.operations import FAST, Operations
from worker.kernels.quantize import Scheme, quantize
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder, Layer, Weights
from worker.model.forward_inputs import ForwardInputs
from worker.model.spec import LayerSpec, ModelSpec, RopeSpec
from worker.run.kernel_check import find_wrong_operations

PLAIN = ModelSpec(
    model_type="llama", vocab_size=70, hidden_size=256, intermediate_size=576, heads=8, kv_heads=2, head_dim=64,
    layers=(LayerSpec(0, 0),), ropes=(RopeSpec("default", 10_000.0),), max_positions=64, norm_eps=1e-6,
    attention_scale=0.125, activation="silu", tied=False, eos_ids=(), dtype="float32",
)  # fmt: skip
SANDWICH = replace(
    PLAIN,
    layers=2 * PLAIN.layers,
    norm_offset=True,
    sandwich_norms=True,
    qk_norm=True,
    activation="gelu_tanh",
    embed_scale=4.0,
)
PAGE = 4


def weight(*shape: int, seed: int) -> Tensor:
    return random(*shape, seed=seed) / shape[-1] ** 0.5 if len(shape) > 1 else random(*shape, seed=seed)


def layer(spec: ModelSpec, seed: int) -> Layer:
    hidden, inner, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    shapes = {"qkv": (spec.qkv_size, hidden), "o": (hidden, spec.heads * d), "gate_up": (2 * inner, hidden),
              "down": (hidden, inner)}  # fmt: skip
    norms = {"before_attention": hidden, "before_mlp": hidden}
    norms |= {"after_attention": hidden, "after_mlp": hidden} if spec.sandwich_norms else {}
    norms |= {"q_norm": d, "k_norm": d} if spec.qk_norm else {}
    fields: dict[str, Any] = {name: weight(size, seed=seed + i) for i, (name, size) in enumerate(norms.items())}
    for i, (name, shape) in enumerate(shapes.items()):
        fields[name] = PackedLinear(weight(*shape, seed=seed + 10 + i), None, True)
    return Layer(**fields)


def decoder_of(spec: ModelSpec, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Decoder:
    head = PackedLinear(weight(spec.vocab_size, spec.hidden_size, seed=1), None, True)
    layers = [layer(spec, 100 * i) for i in range(len(spec.layers))]
    embed = random(spec.vocab_size, spec.hidden_size, seed=2)
    whole = Weights(embed, layers, weight(spec.hidden_size, seed=3), head)
    return Decoder(spec, moved(whole, device, dtype), 64)


def eight_bits(model: Decoder, name: str) -> Decoder:
    """With the linears of its layers quantized, as a GPU has them."""
    if not name:
        return model
    scheme = Scheme.of(name)

    def quantized(packed: PackedLinear) -> PackedLinear:
        values, scale = quantize(packed.weight, scheme.kind)
        return replace(packed, weight=values, scale=scale, dynamic=scheme.dynamic)

    names = ("qkv", "o", "gate_up", "down")
    layers = [replace(one, **{name: quantized(getattr(one, name)) for name in names}) for one in model.weights.layers]
    return Decoder(model.spec, replace(model.weights, layers=layers), 64)


def moved(value: Any, device: str, dtype: torch.dtype) -> Any:
    """A dataclass of tensors, lists and such, on another device; what is float32, as `dtype`."""
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.dtype == torch.float32 else value.dtype)
    if isinstance(value, list):
        return [moved(one, device, dtype) for one in value]
    if isinstance(value, Weights | Layer | PackedLinear | ForwardInputs):
        return replace(value, **{f.name: moved(getattr(value, f.name), device, dtype) for f in fields(value)})
    return value


def logits(model: Decoder, sequences: list[Row]) -> Tensor:
    """Of each one's last token, after its prompt and after one token more."""
    cache = KVCache(model.spec, 20, PAGE, torch.float32, "cpu")
    told = []
    for length in (len(sequences[0].tokens), 1):
        chunks = [(row, length if row is sequences[0] else len(row.tokens) - row.computed) for row in sequences]
        told.append(model.forward(pack(chunks, PAGE), cache))
        for row, computed in chunks:
            row.computed += computed
            row.tokens.append(7)
    return torch.cat(told)


def one() -> Row:
    return Row([5, 9, 60, 2, 33], [3, 7])


def others() -> list[Row]:
    return [Row([8] * 3, [8]), Row([8] * 14, [9, 10, 11, 12])]


def on_triton(model: Decoder) -> Decoder:
    """With what is chosen where tensors are on a GPU, but for attention."""
    from worker.kernels.gpu.linear import gated_linear_triton, linear_triton
    from worker.kernels.gpu.norm import add_rms_norm_triton, rms_norm_triton
    from worker.kernels.gpu.qkv_rope_write import qkv_rope_write_triton
    from worker.kernels.gpu.tiles import is_single_chain

    def linear(x: Tensor, packed: PackedLinear, **how: bool) -> Tensor:
        return linear_triton(x, packed.weight, packed.bias, packed.scale, dynamic=packed.dynamic, **how)

    def gated_linear(x: Tensor, packed: PackedLinear, activation: str) -> Tensor:
        assert is_single_chain(packed.weight)
        return gated_linear_triton(x, packed.weight, packed.bias, activation, packed.scale, dynamic=packed.dynamic)

    triton: Operations = replace(
        FAST, rms_norm=rms_norm_triton, add_rms_norm=add_rms_norm_triton, qkv_rope_write=qkv_rope_write_triton,
        linear=linear, gated_linear=gated_linear,
    )  # fmt: skip
    return Decoder(model.spec, model.weights, 64, triton)


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [(PLAIN, ""), (SANDWICH, ""), (PLAIN, "fp8"), (SANDWICH, "fp8-dynamic"), (PLAIN, "int8-dynamic")],
    ids=["plain", "sandwich", "eight bits", "eight by eight bits", "integers"],
)
def test_the_loop_means_the_same(spec: ModelSpec, scheme: str) -> None:
    model = eight_bits(decoder_of(spec), scheme)
    expected, got = (logits(how, [one(), *others()]) for how in (model, on_triton(model)))
    if "dynamic" in scheme:  # what is rounded one step further is so in all that follows
        assert float((got - expected).norm() / expected.norm()) < 5e-3
    else:
        close(got, expected)


@pytest.mark.usefixtures("dot_in_order")
@pytest.mark.parametrize("scheme", ["", "int8", "int8-dynamic", "fp8-dynamic"])
def test_a_sequence_has_the_same_bits_alone_and_in_company(scheme: str) -> None:
    """Of one row, of a few and of more than a tile of them."""
    model = on_triton(eight_bits(decoder_of(PLAIN), scheme))
    alone, company = logits(model, [one()]), logits(model, [one(), *others()])
    assert torch.equal(company[[0, 3]], alone)


def all_triton(model: Decoder) -> Decoder:
    from worker.kernels.gpu.attention import attention_triton
    from worker.kernels.gpu.sample import sample_triton

    most = on_triton(model)
    return most.with_operations(replace(most.operations, attention=attention_triton, sample_plain=sample_triton))


@pytest.mark.filterwarnings("ignore:overflow encountered in")
@pytest.mark.parametrize("dtype", TRITON_DTYPES)
@pytest.mark.parametrize("scheme", ["", *(pytest.param(one, marks=pytest.mark.gpu) for one in ("int8", "fp8-dynamic"))])
def test_the_comparison_at_start_finds_nothing(scheme: str, dtype: torch.dtype, device: str) -> None:
    windowed = replace(SANDWICH, layers=(LayerSpec(7, 0), LayerSpec(0, 0)))
    model = all_triton(eight_bits(decoder_of(windowed, device, dtype), scheme))
    length = 1300 if device == "cuda" else 21  # the interpreter takes its time
    assert find_wrong_operations(model, WorkerConfig(max_batch_size=4, max_step_tokens=2048, page_size=8), length) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["", "fp8", "fp8-dynamic", "int8-dynamic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decode_waits_for_nothing_and_can_be_recorded(dtype: torch.dtype, scheme: str, device: str) -> None:
    """The host never asks the device; replayed from a CUDA graph, a step gives the same bits."""
    model = eight_bits(decoder_of(SANDWICH, device, dtype), scheme)
    cache = KVCache(model.spec, 20, PAGE, dtype, device)
    packed = moved(pack([(Row([7], [3]), 1), (Row([9], [4]), 1)], PAGE), device, dtype)
    model.forward(packed, cache)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = model.forward(packed, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = model.forward(packed, cache)
    graph.replay()
    assert torch.equal(got, expected) and expected.isfinite().all()
    plain, empty = eight_bits(decoder_of(SANDWICH), scheme), KVCache(SANDWICH, 20, PAGE, torch.float32, "cpu")
    exact = plain.forward(moved(packed, "cpu", dtype), empty)
    assert float((got.cpu() - exact).norm() / exact.norm()) < (0.15 if scheme else 5e-2)  # several layers' roundings

"""The decoder's loop with all Triton kernels except attention: the kernels fit together and give the right results."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from tests.worker.models.harness import Row, pack
from tests.worker.ops.harness.cases import close
from tests.worker.ops.harness.decoders import PARALLEL, PLAIN, SANDWICH, decoder_of, moved
from worker.kv_cache.tensors import KVCache
from worker.model_runner.check_kernels import find_wrong_operations
from worker.models.decoder import Decoder
from worker.operations import FAST, Operations, with_options
from worker.ops.launch_options import GPU_OPTIONS, options_named
from worker.ops.linear.packed import PackedLinear
from worker.ops.linear.packed_codes import pack_codes
from worker.ops.quantized_weight import INT4, Scheme, quantize, quantize_groups
from worker.spec import LayerSpec, ModelSpec

PAGE = 4
MLP = ("gate_up", "down")


def low_bit(model: Decoder, name: str) -> Decoder:
    """Returns the decoder with quantized linears, as on a GPU."""
    if not name:
        return model
    scheme = Scheme.of(name)

    def quantized(packed: PackedLinear) -> PackedLinear:
        if name == "int4":
            codes = pack_codes(quantize_groups(packed.weight, INT4, 32))
            return replace(packed, weight=packed.weight.new_empty(0), codes=(codes,))
        values, scale = quantize(packed.weight, scheme.kind)
        return replace(packed, weight=values, scale=scale, dynamic=scheme.dynamic)

    def changed(part: Any, names: tuple[str, ...]) -> Any:
        return replace(part, **{name: quantized(getattr(part, name)) for name in names})

    layers = [
        replace(one, mixer=changed(one.mixer, ("qkv", "o")), feed_forward=changed(one.feed_forward, MLP))
        for one in model.weights.layers
    ]
    return Decoder(model.spec, replace(model.weights, layers=layers), 64)


def logits(model: Decoder, sequences: list[Row]) -> Tensor:
    """Returns the logits of each sequence's last token, after the prompt and after one more token."""
    cache = KVCache(model.spec, (20,), PAGE, torch.float32, "cpu")
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
    """Returns the decoder with the operations that are chosen on a GPU, except attention."""
    from worker.ops.activation.triton import act_and_mul_triton, activate_triton
    from worker.ops.linear.triton import gated_linear_triton, linear_triton
    from worker.ops.linear.triton_low_bit import can_be_gated, quantized_gated_linear_triton, quantized_linear_triton
    from worker.ops.linear.triton_tiles import is_single_chain
    from worker.ops.norm.triton import add_rms_norm_triton, rms_norm_triton
    from worker.ops.rope.triton import qkv_rope_write_triton

    def linear(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        how["whole_rows"] = packed.whole_rows
        if packed.codes:
            return quantized_linear_triton(x, packed.codes, packed.bias, **how)
        return linear_triton(x, packed.weight, packed.bias, packed.scale, dynamic=packed.dynamic, **how)

    def gated_linear(x: Tensor, packed: PackedLinear, activation: str, **how: Any) -> Tensor:
        whole_rows = packed.whole_rows
        if packed.codes and can_be_gated(packed.codes, whole_rows):
            return quantized_gated_linear_triton(
                x, packed.codes[0], packed.bias, activation, whole_rows=whole_rows, **how
            )
        if packed.codes or not is_single_chain(packed.weight, whole_rows):
            return act_and_mul_triton(linear(x, packed, **how), activation, **how)
        return gated_linear_triton(
            x, packed.weight, packed.bias, activation, packed.scale, dynamic=packed.dynamic, whole_rows=whole_rows,
            **how,
        )  # fmt: skip

    triton: Operations = replace(
        FAST, rms_norm=rms_norm_triton, add_rms_norm=add_rms_norm_triton, qkv_rope_write=qkv_rope_write_triton,
        linear=linear, gated_linear=gated_linear, activate=activate_triton,
    )  # fmt: skip
    return Decoder(model.spec, model.weights, 64, triton)


@pytest.mark.parametrize(
    ("spec", "scheme"),
    [
        (PLAIN, ""),
        (SANDWICH, ""),
        (PARALLEL, ""),
        (PLAIN, "fp8"),
        (SANDWICH, "fp8-dynamic"),
        (PLAIN, "int8-dynamic"),
        (SANDWICH, "int4"),
    ],
    ids=["plain", "sandwich", "parallel", "eight bits", "eight by eight bits", "integers", "four bits"],
)
def test_triton_decoder_agrees_with_the_torch_decoder(spec: ModelSpec, scheme: str) -> None:
    model = low_bit(decoder_of(spec), scheme)
    expected, got = (logits(how, [one(), *others()]) for how in (model, on_triton(model)))
    if "dynamic" in scheme:  # a number that is rounded to the next step changes all later results
        assert float((got - expected).norm() / expected.norm()) < 5e-3
    else:
        close(got, expected)


@pytest.mark.parametrize("scheme", ["", "int8", "int8-dynamic", "fp8-dynamic", "int4"])
def test_sequence_has_the_same_bits_alone_and_in_a_batch(scheme: str) -> None:
    """The batches have one row, a few rows, or more rows than a tile."""
    model = on_triton(low_bit(decoder_of(PLAIN), scheme))
    alone, company = logits(model, [one()]), logits(model, [one(), *others()])
    assert torch.equal(company[[0, 3]], alone)


def test_options_of_kernels_change_no_bit() -> None:
    plain = on_triton(decoder_of(PLAIN))
    options = options_named([*GPU_OPTIONS]).on(torch.device("cpu"))
    other = plain.with_operations(with_options(plain.operations, options))
    assert torch.equal(logits(other, [Row([5, 9], [3])]), logits(plain, [Row([5, 9], [3])]))


def all_triton(model: Decoder) -> Decoder:
    from worker.ops.attention.triton import attention_triton
    from worker.ops.sampling.triton import sample_triton

    def attention(*args: Any, next_weights: object, **how: Any) -> Tensor:
        return attention_triton(*args, **how)

    most = on_triton(model)
    return most.with_operations(replace(most.operations, attention=attention, sample_plain=sample_triton))


@pytest.mark.filterwarnings("ignore:overflow encountered in")
@pytest.mark.parametrize(
    "dtype", [torch.float16, *(pytest.param(one, marks=pytest.mark.gpu) for one in (torch.float32, torch.bfloat16))]
)
@pytest.mark.parametrize(
    "scheme", ["", *(pytest.param(one, marks=pytest.mark.gpu) for one in ("int8", "fp8-dynamic", "int4"))]
)
def test_kernel_check_finds_no_wrong_operation(
    scheme: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # the interpreter merges splits one by one, even those that do not exist
        monkeypatch.setattr("worker.ops.attention.triton.SPLITS_AT_ONCE", 1)
    windowed = replace(SANDWICH, layers=(LayerSpec(7, 0), LayerSpec(0, 0)))
    model = all_triton(low_bit(decoder_of(windowed, device, dtype), scheme))
    length = 1300 if device == "cuda" else 21  # short, because the interpreter is slow
    assert find_wrong_operations(model, WorkerConfig(max_batch_size=4, max_step_tokens=2048, page_size=8), length) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["", "fp8", "fp8-dynamic", "int8-dynamic", "int4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decode_step_never_synchronizes_and_can_be_captured(dtype: torch.dtype, scheme: str, device: str) -> None:
    """The host never waits for the device. Replayed from a CUDA graph, a step gives the same bits."""
    model = low_bit(decoder_of(SANDWICH, device, dtype), scheme)
    cache = KVCache(model.spec, (20,), PAGE, dtype, device)
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
    plain, empty = low_bit(decoder_of(SANDWICH), scheme), KVCache(SANDWICH, (20,), PAGE, torch.float32, "cpu")
    exact = plain.forward(moved(packed, "cpu", dtype), empty)
    # errors of several layers add up
    assert float((got.cpu() - exact).norm() / exact.norm()) < (0.15 if scheme else 5e-2)

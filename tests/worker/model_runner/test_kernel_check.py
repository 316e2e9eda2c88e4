"""Kernels that compute wrongly or fail on a device are found before serving, and the plain forms replace them."""

import logging
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.model_runner.harness import Memory
from tests.worker.models.harness import CPU, decoder_of
from tests.worker.ops.harness.decoders import SANDWICH
from tests.worker.ops.harness.decoders import decoder_of as random_decoder
from tests.worker.ops.harness.fp8_sums import BLOCK_K, fp8_sums
from worker.engine.build import make_runner
from worker.engine.numerics import kernels_name
from worker.kv_cache.tensors import KVCache
from worker.model_runner.check_kernels import (
    FP8_PRODUCTS,
    CompareOperations,
    choose_operations,
    find_wrong_operations,
    worst_row,
)
from worker.model_runner.runner import DeviceBroken
from worker.models.decoder import Decoder
from worker.models.moe import MixtureWeights
from worker.operations import FAST, TORCH, Operations
from worker.ops.linear.packed import PackedLinear
from worker.ops.quantized_weight import Kind, quantize, quantize_tokens
from worker.spec import LayerSpec

LENGTH = 1300
SOUND = replace(FAST, delta_net=TORCH.delta_net)  # in C, recurrent states have another order of elements
NAMES = [one.name for one in fields(Operations)]
Change = Callable[..., Any]


def worker(**settings: Any) -> WorkerConfig:
    return WorkerConfig(**({"max_batch_size": 4, "max_step_tokens": 2048, "prefill_chunk_size": 2048} | settings))


@pytest.fixture(scope="module")
def decoder(checkpoints: Checkpoints) -> Decoder:
    """A decoder with sliding-window layers and full layers."""
    return decoder_of(checkpoints("gemma3"), positions=LENGTH)


def changed(decoder: Decoder, name: str, change: Change) -> Decoder:
    """Returns a decoder with one changed operation. `change` is called with the sound operation and its arguments."""
    sound = getattr(SOUND, name)
    return decoder.with_operations(replace(SOUND, **{name: lambda *args, **how: change(sound, *args, **how)}))


def one_row_off(sound: Change, *args: Any, **how: Any) -> Any:
    """Makes the last row wrong by 5 %."""
    got = sound(*args, **how)
    first = got[0] if isinstance(got, tuple) else got
    if first.is_floating_point():
        first[-1] *= 1.05
    else:
        first[-1] += 1
    return got


@pytest.fixture
def gpu_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Returns a cache as on a GPU, where the check runs: in eight bits without scales."""
    monkeypatch.setattr("worker.kv_cache.tensors.row_elements", lambda head_dim, dtype, device: head_dim)


def failing(sound: Change, *args: Any, **how: Any) -> Any:
    raise RuntimeError("out of resource: shared memory\nhint")


@pytest.mark.usefixtures("gpu_cache")
@pytest.mark.parametrize("kept", ["auto", "fp8"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gemma4", "qwen3_5", "starcoder2", "hunyuan"])
def test_correct_operations_agree(checkpoints: Checkpoints, kind: str, kept: str) -> None:
    """The operations under test are the C kernels."""
    sound = decoder_of(checkpoints(kind), positions=LENGTH).with_operations(SOUND)
    assert find_wrong_operations(sound, worker(kv_cache_dtype=kept), LENGTH) == ""


def rounded_later(name: str) -> Change:
    """Returns a change that computes the plain form in float32 and rounds only its results.

    These differ more from the plain form's results than a kernel's do.
    """

    def wide(value: Any) -> Any:
        if isinstance(value, PackedLinear):
            return replace(value, weight=value.weight.float())
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    def operation(*args: Any, **how: Any) -> Any:
        dtype, change = args[0].dtype, {"dtype": torch.float32} if "dtype" in how else {}
        widened = [wide(arg) for arg in args]
        got = getattr(TORCH, name)(*widened, **{key: wide(value) for key, value in how.items()} | change)
        if name == "qkv_rope_write":
            for cache, written in zip(args[1:3], widened[1:3], strict=True):
                cache.copy_(written.clamp(-448, 448) if cache.dtype == torch.float8_e4m3fn else written)
        if isinstance(got, tuple):
            return tuple(one.to(dtype) for one in got)
        return got.to(dtype) if got.is_floating_point() and not how.get("fp32_out") else got

    return operation


@pytest.mark.usefixtures("gpu_cache")
@pytest.mark.parametrize("kept", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_different_rounding_is_within_tolerance(dtype: torch.dtype, kept: str) -> None:
    spec = replace(SANDWICH, layers=(LayerSpec(100, 0), LayerSpec(0, 0)))
    weights = random_decoder(spec, dtype=dtype).weights
    others = Operations(**{name: rounded_later(name) for name in NAMES})
    assert find_wrong_operations(Decoder(spec, weights, LENGTH, others), worker(kv_cache_dtype=kept), LENGTH) == ""


@pytest.mark.parametrize(
    "settings",
    [{"max_step_tokens": 1, "prefill_chunk_size": 1}, {"kv_cache_backend": "contiguous"}, {"page_size": 1}],
    ids=str,
)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_check_fits_any_settings(decoder: Decoder, settings: dict[str, Any], length: int) -> None:
    assert find_wrong_operations(decoder, worker(max_batch_size=1, **settings), length) == ""


@pytest.fixture(scope="module")
def with_experts(checkpoints: Checkpoints) -> Decoder:
    return decoder_of(checkpoints("qwen3-moe"), positions=LENGTH)


KINDS_WITH = {  # operation → a checkpoint whose decoder has it, for operations that a common decoder lacks
    "experts": "qwen3-moe",
    "output_gate": "qwen3_5",
    "delta_net": "qwen3_5",
    "activate": "starcoder2",
    "short_conv": "lfm2",
    "mamba2": "granite-hybrid",
    "act_and_mul": "gemma4",
    "linear_per_head": "deepseek-v3",
}


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_row_is_found_and_its_operation_named(decoder: Decoder, checkpoints: Checkpoints, name: str) -> None:
    if name in KINDS_WITH:
        decoder = decoder_of(checkpoints(KINDS_WITH[name]), positions=LENGTH)
    found = find_wrong_operations(changed(decoder, name, one_row_off), worker(), LENGTH)
    assert found.startswith(f"{name} ") and "," not in found.replace(", where", ""), "and nothing else is blamed"


def test_rows_whose_choice_of_experts_is_not_clear_are_not_compared(with_experts: Decoder) -> None:
    """A kernel whose logits differ in the last bits may choose another one of two experts with close logits."""
    weights, hidden = with_experts.weights, with_experts.spec.hidden_size
    equal = PackedLinear(torch.zeros(8, hidden), None, True)
    layers = [
        replace(layer, feed_forward=replace(fed, experts=replace(fed.experts, router=equal)))
        if isinstance(fed := layer.feed_forward, MixtureWeights)
        else layer
        for layer in weights.layers
    ]
    undecided = Decoder(with_experts.spec, replace(weights, layers=layers), LENGTH)
    assert find_wrong_operations(changed(undecided, "experts", one_row_off), worker(), LENGTH) == ""


def window_forgotten(sound: Change, *args: Any, **how: Any) -> Tensor:
    return sound(*args, **how | {"window": 0})


def later_pages_swapped(sound: Change, *args: Any, **how: Any) -> Tensor:
    pages = args[5].clone()
    pages[:, 1:3] = pages[:, 1:3].flip(1)
    return sound(*args[:5], pages, *args[6:], **how)


def far_keys_lost(sound: Change, *args: Any, **how: Any) -> Tensor:
    """Ignores the keys before the last split, but only in steps without prompts."""
    starts, kv_lens = args[3:5]
    return sound(
        *args,
        **how | {"window": 256 if len(starts) == len(args[0]) + 1 and int(kv_lens.max()) > 600 else how["window"]},
    )


def last_tile_unwritten(sound: Change, *args: Any, **how: Any) -> Tensor:
    got = sound(*args, **how)
    if len(got) > 128:
        got[-(len(got) % 128) :] = 0.0
    return got


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("attention", window_forgotten),
        ("attention", later_pages_swapped),
        ("attention", far_keys_lost),
        ("linear", last_tile_unwritten),
    ],
)
def test_fault_in_some_steps_only_is_found(decoder: Decoder, name: str, change: Change) -> None:
    assert find_wrong_operations(changed(decoder, name, change), worker(), LENGTH).startswith(f"{name} is off by ")


def test_key_written_to_another_slot_is_found(decoder: Decoder) -> None:
    def stray(sound: Change, *args: Any, **how: Any) -> Tensor:
        q = sound(*args, **how)
        args[1].flatten(0, 1)[-1] = 1.0
        return q

    assert find_wrong_operations(changed(decoder, "qkv_rope_write", stray), worker(), LENGTH).startswith(
        "qkv_rope_write is off by inf"
    )


@pytest.mark.parametrize("change", [one_row_off, failing])
def test_wrong_operation_makes_all_plain(decoder: Decoder, change: Change, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    served, budget = choose_operations(changed(decoder, "attention", change), worker(), LENGTH, Memory(), lambda: None)
    assert served.operations is TORCH and budget.nbytes > 0 and kernels_name(served, torch.float32) == "torch"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = "fails (RuntimeError: out of resource: shared memory)" if change is failing else "is off by 0.0"
    assert f"on Fake GPU attention {said}" in warning
    cache = KVCache(served.spec, (2,), 32, torch.float32, CPU)
    assert make_runner(served, cache, worker(), on_gpu=True)._graphs is None
    assert make_runner(decoder, cache, worker(), on_gpu=True)._graphs is not None


def test_correct_operations_are_kept(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    served, _ = choose_operations(decoder, worker(), LENGTH, Memory(), lambda: None)
    assert served.operations is FAST and not caplog.records


@pytest.mark.parametrize(("kernels", "operations"), [("triton", None), ("torch", TORCH)])
def test_kernels_flag_overrides_the_check(decoder: Decoder, kernels: str, operations: Operations | None) -> None:
    wrong = changed(decoder, "linear", one_row_off)
    served, _ = choose_operations(wrong, worker(kernels=kernels), 40, Memory(), lambda: None)
    assert served.operations is (operations or wrong.operations)


def test_kernel_failing_in_the_largest_step_makes_all_plain(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    def small_only(sound: Change, x: Tensor, *args: Any, **how: Any) -> Tensor:
        return failing(sound) if len(x) > 1300 else sound(x, *args, **how)

    memory = Memory(takes=(1, 1, 2, 1, 1, 2, 2))
    served, _ = choose_operations(changed(decoder, "linear", small_only), worker(), LENGTH, memory, lambda: None)
    assert served.operations is TORCH and "a step fails (RuntimeError: out of resource" in caplog.text


def test_device_left_unusable_by_a_kernel_raises_device_broken(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the kernel's failure, no operation works on the device, not even in its plain form."""
    from worker.model_runner import check_kernels

    def broken(*args: Any, **how: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    def breaks(sound: Change, *args: Any, **how: Any) -> Any:
        monkeypatch.setattr(check_kernels, "TORCH", Operations(*[broken] * len(NAMES)))
        return broken()

    with pytest.raises(DeviceBroken, match=r"Fake GPU attention fails .*illegal memory access.*--kernels torch"):
        choose_operations(changed(decoder, "attention", breaks), worker(), LENGTH, Memory(), lambda: None)


def test_out_of_memory_in_the_check_is_not_a_fault(decoder: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    """If the plain forms, which need more memory than kernels, run out of memory, that is no fault either."""

    def full(*args: Any, **how: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    assert find_wrong_operations(changed(decoder, "linear", full), worker(), LENGTH) == ""
    assert "does: OutOfMemoryError" in caplog.text
    with pytest.raises(torch.OutOfMemoryError):
        choose_operations(changed(decoder, "linear", full), worker(), LENGTH, Memory(), lambda: None)


def test_worst_row_is_relative_to_lengths() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.001], [30.0, 40.0]])
    off = rows.clone()
    off[1, 0] += 0.5
    assert worst_row(rows, rows) == 0.0
    assert worst_row(off, rows) == pytest.approx(0.1), "a short row, by the median one's length"
    off[2, 0] = torch.nan
    assert worst_row(off, rows) == torch.inf
    assert worst_row(rows, off) == pytest.approx(1.0, abs=1e-3), (
        "what the plain form has no number for cannot be compared"
    )


@pytest.mark.parametrize(
    ("kind", "error", "wrong"), [("fp8", 0.003, False), ("fp8", 0.009, True), ("int8", 0.003, True)]
)
def test_fp8_products_may_be_as_inexact_as_tensor_cores_add_them(kind: Kind, error: float, wrong: bool) -> None:
    def inexact(x: Tensor, packed: PackedLinear, **how: Any) -> Tensor:
        return TORCH.linear(x, packed, **how) * (1 + error)

    values, scale = quantize(torch.randn(24, 64), kind)
    both = CompareOperations(replace(FAST, linear=inexact), TORCH, torch.float32)
    both.operations.linear(torch.randn(5, 64), PackedLinear(values, None, True, scale=scale, dynamic=True))
    assert bool(both.problems) == wrong


def test_sums_of_fp8_products_on_tensor_cores_stay_within_the_tolerance() -> None:
    """Half of it suffices if each 128 products start from zero, as in our kernels; one sum over all of K would not."""
    x = torch.randn(8, 9728, generator=torch.Generator().manual_seed(0))
    x[:, ::97] *= 30
    weight = torch.randn(32, 9728, generator=torch.Generator().manual_seed(1))
    tokens, _ = quantize_tokens(x, torch.float8_e4m3fn)
    values, _ = quantize(weight, "fp8")
    exact = tokens.double() @ values.double().T
    restarted, one_sum = (worst_row(fp8_sums(tokens, values, stage), exact) for stage in (BLOCK_K, 9728))
    assert restarted < FP8_PRODUCTS["linear"] / 2 < FP8_PRODUCTS["linear"] < one_sum

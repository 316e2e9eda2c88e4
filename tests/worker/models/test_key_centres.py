"""Keys in int8 are kept without the constant part of their bias: whose, which part, and that nothing else changes."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from shared.config.worker import WorkerConfig
from tests.checkpoints import Checkpoints
from tests.worker.models.harness import CPU, all_logits, cache_for, decoder_of, prompts_of
from worker.checkpoint.checkpoint import read_config
from worker.engine.numerics import choose_formats
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import CENTRE_POSITIONS, Decoder, centred_over, key_centre, tables
from worker.models.load import load
from worker.models.sharding import Share
from worker.spec import RopeSpec

# rotated as in the kernels; GLM rotates neighbours, and half of a head, StableLM a quarter
BIASED = ("qwen2", "llama-biased", "glm4", "stablelm", "starcoder2", "qwen2-moe")


@pytest.mark.parametrize(
    ("kind", "centred"),
    [
        *((kind, CENTRE_POSITIONS) for kind in BIASED),
        ("llama", 0), ("qwen3", 0), ("glm4-moe", 0),  # no bias, or a norm behind it
        ("gpt-oss", 0), ("gemma2", 0),  # sinks, a soft cap
        ("deepseek-v2-groups", 0),  # the rows of keys are the values, too
    ],
)  # fmt: skip
def test_keys_with_a_bias_have_a_centre_unless_more_than_their_scores_depends_on_them(
    checkpoints: Checkpoints, kind: str, centred: int
) -> None:
    decoder = decoder_of(checkpoints(kind))
    assert centred_over(decoder.spec) == centred
    assert {centre is not None for centre in decoder.key_centres} == {centred > 0}
    for kept in ("auto", "fp8", "int8"):
        name = choose_formats(decoder.spec, WorkerConfig(device="cpu", kv_cache_dtype=kept), CPU).kv_name
        assert (f"centred over {CENTRE_POSITIONS} positions" in name) == (centred > 0 and kept == "int8")


def test_centre_is_the_mean_of_the_rotated_bias_and_the_length_of_the_context_does_not_change_it() -> None:
    rope, bias = RopeSpec("default", 1e4), torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = tables(rope, 16, CENTRE_POSITIONS, CPU)
    turned = torch.cat((-bias[:, 8:], bias[:, :8]), dim=1)
    every = bias * cos[:, None] + turned * sin[:, None]  # [positions, heads, D]
    torch.testing.assert_close(key_centre(bias, cos, sin), every.double().mean(0).float(), rtol=1e-5, atol=1e-6)


def test_length_of_the_context_does_not_change_the_centre(checkpoints: Checkpoints) -> None:
    one, other = (decoder_of(checkpoints("qwen2"), positions=positions) for positions in (64, 20_000))
    assert_equal(one.key_centres, other.key_centres)


def assert_equal(some: list[Tensor | None], others: list[Tensor | None]) -> None:
    for one, other in zip(some, others, strict=True):
        assert one is not None and other is not None and torch.equal(one, other)


def test_ranks_have_the_centres_of_their_heads(checkpoints: Checkpoints) -> None:
    folder = checkpoints("qwen2")
    whole, spec = decoder_of(folder), spec_from_config(read_config(folder))
    assert spec.kv_heads == 2
    shares = [
        Decoder(share.spec(spec), load(folder, spec, torch.float32, CPU, invariant=False, share=share), 64)
        for share in (Share(0, 2), Share(1, 2))
    ]
    joined = [
        torch.cat([one for one in parts if one is not None])
        for parts in zip(*(share.key_centres for share in shares), strict=True)
    ]
    assert_equal(whole.key_centres, list(joined))


def with_large_biases(folder: Path, to: Path) -> Path:
    """Makes large biases of keys in the dimensions that do not rotate in `slow`."""
    shutil.copytree(folder, to)
    spec, tensors = spec_from_config(read_config(folder)), load_file(to / "model.safetensors")
    rope = spec.ropes[0]
    half = (rope.rotated or spec.head_dim) // 2
    fast = [0, 1, 2, 3] if rope.neighbours else [0, 1, half, half + 1]
    for name, bias in tensors.items():
        if name.endswith("k_proj.bias"):
            added = torch.randn(spec.kv_heads, spec.head_dim, generator=torch.Generator().manual_seed(len(name))) * 100
            added[:, fast] = 0.0
            tensors[name] = bias + added.flatten().to(bias.dtype)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def slow(folder: Path) -> Decoder:
    """Returns a model of which only the first two pairs of the dimensions of a head rotate."""
    spec = spec_from_config(read_config(folder))
    spec = replace(spec, ropes=tuple(replace(rope, theta=1e30) for rope in spec.ropes))
    return Decoder(spec, load(folder, spec, torch.float32, CPU, invariant=False), 128)


@pytest.mark.parametrize("kept", ["int8", "int4"])
@pytest.mark.parametrize("kind", BIASED)
@torch.inference_mode()
def test_large_biases_that_are_constant_change_nothing(
    checkpoints: Checkpoints, tmp_path: Path, kind: str, kept: str
) -> None:
    folder = checkpoints(kind)
    plain, large = slow(folder), slow(with_large_biases(folder, tmp_path / kind))
    without = replace_centres(large, [None] * len(large.key_centres))
    expected, got, worse = (logits_of(decoder, kept) for decoder in (plain, large, without))
    assert away(got, expected) < 0.15 < 0.3 < away(worse, expected)


def logits_of(decoder: Decoder, kept: str) -> Tensor:
    """Returns the logits of two prompts, which the loop in Python and the one in C compute with the same bits."""
    cache, prompts = cache_for(decoder, tokens=256, kept=kept), prompts_of([70, 33])
    logits = torch.cat(all_logits(decoder, cache, prompts, 24))
    assert torch.equal(torch.cat(all_logits(fastest_decoder(decoder, cache), cache, prompts, 24)), logits)
    return logits


def replace_centres(decoder: Decoder, centres: list[Tensor | None]) -> Decoder:
    other = decoder.with_operations(decoder.operations)
    other.key_centres = centres
    return other


def away(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())

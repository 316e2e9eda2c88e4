"""One model may mix kinds of mixers."""

from dataclasses import fields, replace

import pytest
import torch

from tests.checkpoints import Checkpoints
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from tests.worker.ops.harness.cpu_tiers import needs_library
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.models.decoder import Decoder, Layer
from worker.models.layer_kinds import MIXERS, mixer


def mixing(checkpoints: Checkpoints, dtype: torch.dtype) -> Decoder:
    """Makes a decoder of LFM2's layers, then the recurrent layers of Granite 4 and Qwen3.5, with LFM2's settings."""
    first, *others = (decoder_of(checkpoints(kind), dtype=dtype) for kind in ("lfm2", "granite-hybrid", "qwen3_5"))
    layers, kinds = list(first.weights.layers), list(first.spec.layers)
    for other in others:
        both = zip(other.weights.layers, other.spec.layers, strict=True)
        recurrent = [(layer, replace(kind, rope=0)) for layer, kind in both if kind.recurrent]
        layers += [layer for layer, _ in recurrent]
        kinds += [kind for _, kind in recurrent]
    spec = replace(first.spec, layers=tuple(kinds))
    return Decoder(spec, replace(first.weights, layers=layers), first.max_positions)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_model_mixes_all_kinds_with_the_same_bits_in_c(checkpoints: Checkpoints, dtype: torch.dtype) -> None:
    decoder = mixing(checkpoints, dtype)
    assert {layer.mixer for layer in decoder.spec.layers} == {*MIXERS} - {"latent"}  # which all layers have, or none
    caches = [cache_for(decoder, tokens=256) for _ in range(2)]
    fast = fastest_decoder(decoder, caches[1])
    assert isinstance(fast, CpuDecoder)
    with torch.inference_mode():
        plain, ours = (
            all_logits(one, cache, prompts_of([5, 40, 17]), 16)
            for one, cache in zip((decoder, fast), caches, strict=True)
        )
    assert all(map(torch.equal, ours, plain)) and all(logits.isfinite().all() for logits in ours)
    for a, b in zip(caches[0].states.values(), caches[1].states.values(), strict=True):
        assert torch.equal(a.tail[1:7].nan_to_num(), b.tail[1:7].nan_to_num())


def test_weights_of_a_kind_name_it() -> None:
    assert all(mixer(kind).stored.weights.kind == kind for kind in MIXERS)  # type: ignore[attr-defined]


def test_layer_has_few_fields() -> None:
    """Fields that only some kinds of layers need belong to the records of the kinds' weights, not to Layer."""
    assert len(fields(Layer)) <= 10

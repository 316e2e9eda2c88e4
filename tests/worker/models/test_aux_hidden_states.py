"""Both decoders write the outputs of inner layers for the rows with logits, and these equal transformers' outputs."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from shared.messages import Sampling
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.model_runner.harness import MAX_SEQ_LEN, batch_invariant_decoder
from tests.worker.spec_decode.eagle_heads import hidden_states
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.model_runner.inputs import build_inputs, dummy_sequence
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.scheduler.sequence import Chunk

LENGTH = 37
KINDS = ("llama", "qwen3_5", "gemma4", "olmo2", "cohere", "qwen3-moe")


@pytest.mark.parametrize("rows", [1, 9, 30, LENGTH])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_outputs_of_inner_layers_are_those_of_transformers(kind: str, rows: int, checkpoints: Checkpoints) -> None:
    draw = random.Random(rows)
    tokens = [draw.randrange(3, VOCAB) for _ in range(LENGTH)]
    at = torch.tensor(sorted(draw.sample(range(LENGTH), rows)))
    decoder = batch_invariant_decoder(checkpoints(kind), torch.float32)
    spec, groups = decoder.spec, cache_groups(decoder.spec, MAX_SEQ_LEN, paged=True)
    layers = tuple(draw.sample(range(len(spec.layers)), 3))
    found = []
    for in_c in (True, False):
        cache = KVCache(spec, [9] * len(groups), 16, torch.float32, "cpu", groups, 4, torch.float32)
        model = fastest_decoder(decoder, cache) if in_c else decoder
        assert isinstance(model, CpuDecoder) == in_c
        sequence = dummy_sequence(tokens, 16, len(groups), Sampling(1))
        for pages in sequence.pages:
            pages[:] = type(pages)("i", range(1, 1 + len(pages)))
        inputs, _ = build_inputs([Chunk(sequence, 0, LENGTH, True)], 16, cache.device, recurrent=spec.recurrent)
        inputs = replace(inputs, logits_indices=at)
        outputs = torch.full((3, rows, spec.hidden_size), torch.nan)
        plain = model.hidden(inputs, cache).clone()
        aux_hidden_states = model.hidden(
            replace(inputs, aux_hidden_states=tuple(zip(layers, outputs, strict=True))), cache
        )
        assert torch.equal(plain, aux_hidden_states), "the model computes the same"
        found.append(torch.cat([*outputs], dim=-1))
    assert torch.equal(*found)
    model = AutoModelForCausalLM.from_pretrained(checkpoints(kind), attn_implementation="eager").eval()
    torch.testing.assert_close(found[0], hidden_states(model, tokens, layers)[at], rtol=1e-3, atol=1e-3)

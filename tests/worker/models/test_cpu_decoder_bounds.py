"""The CPU decoder with sizes at the bounds of the C library's arrays, and with the smallest and oddest sizes."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers  # imports the code of a family when that is first used

from tests.checkpoints import VOCAB
from tests.pairs import in_pairs
from tests.worker.models.harness import all_logits, cache_for, decoder_of, prompts_of
from tests.worker.ops.harness.cpu_tiers import FUNCTIONS, needs_library, tier  # noqa: F401
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.ops.native import MAX_CHOSEN, MAX_HEAD_DIM, MAX_KEY_ELEMENTS, MAX_TAPS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = [needs_library, pytest.mark.usefixtures("tier")]
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 1, "max_position_embeddings": 64}


def llama(hidden: int, heads: int, kv_heads: int, head_dim: int, mlp: int) -> "PreTrainedModel":
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim,
            intermediate_size=mlp, **SMALL,
        )
    )  # fmt: skip


def mixtral(experts: int) -> "PreTrainedModel":
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, intermediate_size=8,
            num_local_experts=experts, num_experts_per_tok=experts, **SMALL,
        )
    )  # fmt: skip


def lfm2(taps: int) -> "PreTrainedModel":
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            hidden_size=16, num_attention_heads=2, num_key_value_heads=1, intermediate_size=24, conv_L_cache=taps,
            layer_types=["conv", "full_attention"], **{**SMALL, "num_hidden_layers": 2},
        )
    )  # fmt: skip


HEADS = 128
MODELS = {
    "longest heads": lambda: llama(16, 2, 1, MAX_HEAD_DIM, 8),
    "most keys": lambda: llama(HEADS, HEADS, HEADS, MAX_KEY_ELEMENTS // HEADS, 8),
    "many heads for one key": lambda: llama(256, 256, 1, 8, 8),
    "smallest": lambda: llama(2, 1, 1, 2, 1),
    "odd": lambda: llama(33, 3, 1, 34, 7),
    "most experts": lambda: mixtral(MAX_CHOSEN),
    "most taps": lambda: lfm2(MAX_TAPS),
    "one tap": lambda: lfm2(1),
}


@in_pairs(FUNCTIONS | {"kept": ["auto", "int8"], "name": MODELS}, indirect=["tier"])
def test_sizes_at_the_bounds_give_the_bits_of_the_plain_loop(
    name: str, kept: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    MODELS[name]().save_pretrained(tmp_path)
    decoder = decoder_of(tmp_path, dtype=dtype, positions=64)
    prompts = prompts_of([1, 18, 5])
    found = []
    with torch.inference_mode():
        for model in (lambda cache: decoder, lambda cache: fastest_decoder(decoder, cache)):
            cache = cache_for(decoder, tokens=96, kept=kept)
            chosen = model(cache)
            found.append(all_logits(chosen, cache, prompts, 7))
    assert isinstance(chosen, CpuDecoder)
    assert all(map(torch.equal, *found)) and all(bool(logits.isfinite().all()) for logits in found[0])

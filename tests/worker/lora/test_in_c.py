"""The loop in C with adapters against the loop in Python: the same bits in logits, K/V and recurrent states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.messages import Sampling
from tests.adapters import draw_adapter
from tests.checkpoints import Checkpoints
from tests.worker.lora.harness import decoder_of, loaded, use
from tests.worker.models.harness import cache_for, pack, prompts_of, rows_for
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier  # noqa: F401
from worker.lora.loaded import LoadedAdapter
from worker.lora.ops import operations_with_adapters
from worker.models.cpu_decoder import CpuDecoder, fastest_decoder
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Chunk, Sequence

pytestmark = [needs_library, pytest.mark.usefixtures("tier")]
LENGTHS = (1, 6, 1, 37, 1, 9, 1)
OWNERS = (0, None, 1, 0, 1, None, 0)  # adapter of each sequence; rows of the same adapter are not neighbours
SCALES = (1.0, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0)
# for example, with biases, a gated shared expert, recurrent layers, or attention and MLP that have the same input
KINDS = ("llama-biased", "qwen2-moe", "qwen3_5", "lfm2", "cohere2", "gemma3", "deepseek-v3")


def outputs(
    decoder: Decoder, adapters: list[LoadedAdapter], *, in_c: bool, all_rows: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the logits of two steps, and everything in the cache."""
    cache = cache_for(decoder, tokens=600)
    rows = rows_for(cache, prompts_of(list(LENGTHS)), 8)
    model = fastest_decoder(decoder, cache) if in_c else decoder
    sequences = [Sequence((b"f", i), row.tokens, len(row.tokens), Sampling(1), 0) for i, row in enumerate(rows)]
    for sequence, owner, scale in zip(sequences, OWNERS, SCALES, strict=True):
        sequence.adapter = None if owner is None else use(adapters[owner], scale)
    found = []
    for _ in range(2):
        lengths = [len(row.tokens) - row.computed for row in rows]
        inputs = pack(list(zip(rows, lengths, strict=True)), cache.page_size, all_rows=all_rows)
        if not all_rows:
            inputs = replace(inputs, logits_indices=inputs.logits_indices[1::2].clone())
        chunks = [Chunk(one, row.computed, n, True) for one, row, n in zip(sequences, rows, lengths, strict=True)]
        changed = model.with_operations(operations_with_adapters(model.operations, chunks, inputs))
        assert isinstance(changed, CpuDecoder) == in_c
        found.append(changed.forward(inputs, cache).clone())
        for row, length in zip(rows, lengths, strict=True):
            row.advance(length)
            row.tokens.append(7)
    states = [part for state in cache.states.values() for part in (state.tail, state.memory)]
    return found, [part.view(torch.uint8) for part in (*cache.k, *cache.v, *states)]


@dtypes
@pytest.mark.parametrize("kind", KINDS)
def test_loop_in_c_gives_the_bits_of_the_plain_loop_with_adapters(
    kind: str, dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(kind)
    decoder = decoder_of(base, dtype)
    few = ("v_proj", "down_proj", "out_proj")  # so few that some columns and some linears are not adapted
    adapters = [
        loaded(base, decoder, draw_adapter(base, tmp_path / "a", 1, r=40)),
        loaded(base, decoder, draw_adapter(base, tmp_path / "b", 2, r=4, targets=few)),
    ]
    with torch.inference_mode():
        for all_rows in (False, True):
            plain = outputs(decoder, adapters, in_c=False, all_rows=all_rows)
            for one, other in zip(plain, outputs(decoder, adapters, in_c=True, all_rows=all_rows), strict=True):
                assert all(map(torch.equal, one, other))


def test_loop_in_c_adds_nothing_to_columns_that_an_adapter_does_not_change(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    decoder = decoder_of(base)
    adapter = loaded(base, decoder, draw_adapter(base, tmp_path / "a", 1, targets=("q_proj", "v_proj")))
    spec, qkv = decoder.spec, decoder.weights.layers[0].mixer.qkv  # type: ignore[attr-defined]
    parts = adapter.products[id(qkv)].parts
    keys = (spec.heads + spec.kv_heads) * spec.head_dim
    assert [(part.column, part.columns) for part in parts] == [
        (0, spec.heads * spec.head_dim), (keys, spec.kv_heads * spec.head_dim)
    ]  # fmt: skip

"""Rows with an adapter have the same bits in any company, and change no bit of other rows in the step."""

from pathlib import Path

import pytest
import torch

from shared.messages import Sampling
from tests.adapters import draw_adapter
from tests.checkpoints import VOCAB, Checkpoints
from tests.worker.lora.harness import Asked, added, answers, decoder_of, loaded, use
from tests.worker.models.harness import cache_for, pack, rows_for
from worker.lora.ops import operations_with_adapters
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.scheduler.sequence import Chunk, Sequence

PROMPTS = [[(11 * i + 5 * n) % (VOCAB - 3) + 3 for i in range(9 + 7 * n)] for n in range(9)]


def eight(base: Path, decoder: Decoder, folder: Path) -> list[Asked]:
    """Requests with eight adapters and without an adapter, greedy and sampled."""
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    adapters = [
        loaded(base, decoder, draw_adapter(base, folder / str(n), n, r=(4, 8, 20)[n % 3], dtype=dtypes[n % 3]))
        for n in range(8)
    ]
    pairs = zip(PROMPTS, [*adapters, None], strict=True)
    return [
        Asked(prompt, adapter, 16, seed=n if n % 2 else None, repetition=1.3 if n % 3 == 1 else 1.0)
        for n, (prompt, adapter) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", torch.float32), ("llama", torch.bfloat16), ("qwen3-moe", torch.float32), ("lfm2", torch.float32)],
)
def test_eight_adapters_and_the_base_in_one_batch_answer_as_each_alone(
    family: str, dtype: torch.dtype, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints(family)
    decoder = decoder_of(base, dtype)
    asked = eight(base, decoder, tmp_path)
    alone = [answers(decoder, [one])[0] for one in asked]
    assert len({tuple(ids) for ids in alone}) == len(alone)
    assert answers(decoder, asked) == alone
    assert answers(decoder, asked[::-1], chunk=5, prefix_cache=False)[::-1] == alone
    assert answers(decoder, [*asked, *asked], preempt_at=3) == [*alone, *alone], "cached prefixes are of one adapter"
    assert answers(decoder, asked, max_loras=2) == alone
    if not decoder.spec.recurrent:
        assert answers(decoder, asked, drafts=4) == alone


def test_logits_of_rows_have_the_same_bits_with_and_without_adapters_beside_them(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("qwen3")
    decoder = decoder_of(base)
    adapter = loaded(base, decoder, draw_adapter(base, tmp_path / "a", 1))

    def logits(owners: list[bool], which: list[int]) -> torch.Tensor:
        cache = cache_for(decoder, tokens=600)
        rows = rows_for(cache, [PROMPTS[i] for i in which], 0)
        chunks = [(row, len(row.tokens)) for row in rows]
        sequences = [Sequence((b"f", i), PROMPTS[i], len(PROMPTS[i]), Sampling(1), 0) for i in which]
        for sequence, owns in zip(sequences, owners, strict=True):
            sequence.adapter = use(adapter) if owns else None
        planned = [Chunk(sequence, 0, len(sequence.tokens), True) for sequence in sequences]
        inputs = pack(chunks, cache.page_size)
        if not any(owners):
            return fastest_decoder(decoder, cache).forward(inputs, cache).clone()
        changed = decoder.with_operations(operations_with_adapters(decoder.operations, planned, inputs))
        return changed.forward(inputs, cache)

    mixed = logits([True, False, True, False], [0, 1, 2, 3])
    assert torch.equal(mixed[[1, 3]], logits([False, False], [1, 3])), "rows without adapter, by the loop in C"
    assert torch.equal(mixed[[0]], logits([True], [0])) and torch.equal(mixed[[2]], logits([True], [2]))
    assert not torch.equal(mixed[[0]], logits([False], [0]))


def test_scales_of_one_adapter_share_a_batch_and_multiply_its_products(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("qwen3")
    decoder = decoder_of(base)
    folders = [draw_adapter(base, tmp_path / str(alpha), 7, lora_alpha=alpha) for alpha in (16, 8, 32)]
    whole, *others = [loaded(base, decoder, folder) for folder in folders]
    asked = [Asked(PROMPTS[4], whole, scale=scale) for scale in (1.0, 0.5, 2.0)]
    together = answers(decoder, asked)
    assert together == [answers(decoder, [one])[0] for one in asked] and len({*map(tuple, together)}) == 3
    assert together[1:] == [answers(decoder, [Asked(PROMPTS[4], other)])[0] for other in others]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_adapter_on_a_quantized_base_changes_it_as_its_dequantized_base(
    quantization: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    base = checkpoints("llama")
    exact, few = decoder_of(base), decoder_of(base, quantization=quantization)
    folder = draw_adapter(base, tmp_path / "a", 2)
    for before, after in zip(exact.weights.layers, few.weights.layers, strict=True):
        x = torch.randn(3, exact.spec.hidden_size)
        one = added(loaded(base, exact, folder).products[id(before.mixer.qkv)], x)  # type: ignore[attr-defined]
        other = added(loaded(base, few, folder).products[id(after.mixer.qkv)], x)  # type: ignore[attr-defined]
        assert torch.equal(one, other), "the product does not depend on how the base is kept"
    asked = [Asked(PROMPTS[3], loaded(base, few, folder)), Asked(PROMPTS[3], None)]
    together = answers(few, asked)
    assert together == [answers(few, [one])[0] for one in asked] and together[0] != together[1]

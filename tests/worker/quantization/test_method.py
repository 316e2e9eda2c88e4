"""GGUF models give transformers' results in float32 with the same dequantized weights."""

from pathlib import Path

import pytest
import torch

from shared.gguf.translated import translated
from tests.gguf_files import mixed, mxfp4, write
from tests.gguf_kinds import KINDS, MIXTURES
from tests.worker.models.harness import Oracle, all_logits, cache_for, decoder_of, prompts_of, run_greedy
from worker.quantization.gguf import FORMATS

TOLERANCE = 1e-4  # largest error of log-probabilities
# number of greedy ids that are compared, for each format and for each architecture
FORMAT_TOKENS, KIND_TOKENS = 100, 32


@pytest.mark.parametrize(
    ("kind", "types"),
    [
        *((kind, mixed) for kind in KINDS),
        *(("llama", type) for type in (*FORMATS, "F16", "BF16", "F32")),
        *((kind, type) for kind in MIXTURES for type in ("F16", mxfp4)),
    ],
)
def test_logprobs_and_greedy_ids_equal_transformers(kind: str, types: str, tmp_path: Path) -> None:
    written = write(kind, tmp_path, types)
    decoder, oracle = decoder_of(translated([written.file], tmp_path / "cache")), Oracle(written.reference)
    prompts = prompts_of([5, 40, 23])
    cache = cache_for(decoder, tokens=1024)
    for prompt, logits in zip(prompts, all_logits(decoder, cache, prompts, chunk=16), strict=True):
        difference = logits.log_softmax(-1) - oracle.logits(prompt).log_softmax(-1)
        assert difference.abs().max() < TOLERANCE
    count = FORMAT_TOKENS if kind == "llama" else KIND_TOKENS
    ids = run_greedy(decoder, cache_for(decoder, tokens=1024), prompts, count, chunk=16)
    assert ids == [oracle.choices(prompt, answer) for prompt, answer in zip(prompts, ids, strict=True)]
    assert len(set(map(tuple, ids))) == len(ids) and len({one for row in ids for one in row}) > 3


def test_head_and_linears_stay_in_few_bits(tmp_path: Path) -> None:
    decoder = decoder_of(translated([write("qwen3", tmp_path, mixed).file], tmp_path / "cache"))
    assert decoder.weights.embed.dtype is torch.float32 and decoder.spec.stored is not None
    assert decoder.spec.stored.kind == "Q4_K_M"

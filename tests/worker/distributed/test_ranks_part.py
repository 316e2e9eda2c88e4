"""Tensor-parallel parts of a model, each in a thread, compute the bits of the whole model together."""

import mmap
import re
import shutil
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoints import Checkpoints
from tests.worker.distributed.threads import together
from tests.worker.models.harness import CPU, advance, cache_for, pack, prompts_of, rows_for
from tests.worker.models.quantized_checkpoints import gptq, rewrite
from tests.worker.ops.harness.cpu_tiers import dtypes, needs_library, tier  # noqa: F401
from worker.checkpoint.checkpoint import read_config
from worker.distributed.exchange import PartDecoder
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.layer_kinds import LayerNames, mixer
from worker.models.load import load
from worker.models.sharding import CannotShare, Share, check, parts_of_kv
from worker.ops.exchange import RankLost, RanksC, shared_bytes
from worker.quantization.methods import AS_STORED, in_memory
from worker.spec import ModelSpec

LENGTHS = [1, 5, 16, 17, 40, 70]
SMALL_ROUND = 4096  # bytes; so few that rows are exchanged in several rounds


def part(folder: Path, dtype: torch.dtype, share: Share, memory: mmap.mmap) -> PartDecoder:
    spec = spec_from_config(read_config(folder))
    weights = load(folder, spec, dtype, CPU, invariant=True, share=share)
    decoder = Decoder(share.spec(spec), weights, 512)
    return PartDecoder(decoder, cache_for(decoder, tokens=512), RanksC(memory, share.rank, share.count))


def forward(part: PartDecoder, inputs: ForwardInputs) -> Tensor:
    with torch.inference_mode():
        return part.logits(part.hidden(inputs))


@needs_library
@dtypes
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("llama-biased", 4),
        ("gemma3", 2),
        ("phi3", 2),
        ("cohere2", 2),
        ("gemma4", 2),
        ("apertus", 2),
        ("gpt-oss", 2),
        ("qwen2-moe", 2),
        ("gemma4-moe", 2),
        ("glm4-moe", 2),
        ("qwen3_5", 2),
        ("qwen3-next", 2),
        ("lfm2-moe", 2),
        ("ernie4_5-moe", 2),
        ("cohere2-moe", 2),
        ("afmoe", 2),
        ("deepseek-v2", 4),
        ("deepseek-v3", 2),
    ],
)
def test_parts_give_the_bits_of_the_whole_model(
    checkpoints: Checkpoints, kind: str, count: int, dtype: torch.dtype
) -> None:
    folder = checkpoints(kind)
    spec = spec_from_config(read_config(folder))
    whole = Decoder(spec, load(folder, spec, dtype, CPU, invariant=True), 512)
    cache = cache_for(whole, tokens=512)
    model = fastest_decoder(whole, cache)
    memory = mmap.mmap(-1, shared_bytes(SMALL_ROUND))
    parts = [part(folder, dtype, Share(rank, count), memory) for rank in range(count)]
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    with torch.inference_mode():
        for number, chunk in enumerate([33, 1, 1, 33, 33]):  # prompts, decodes, both; some steps want no logits
            chunks = advance(rows, chunk)
            inputs = pack(chunks, cache.page_size, all_rows=number == 3)
            expected = model.forward(inputs, cache)
            for found in together([partial(forward, one, inputs) for one in parts]):
                assert torch.equal(found, expected)
            for row, length in chunks:
                row.advance(length)


@needs_library
def test_rank_that_is_gone_ends_the_wait_of_all_others(checkpoints: Checkpoints) -> None:
    folder, memory = checkpoints("llama"), mmap.mmap(-1, shared_bytes(SMALL_ROUND))
    parts = [part(folder, torch.float32, Share(rank, 2), memory) for rank in range(2)]
    (row,) = rows_for(parts[0]._cache, prompts_of([40]), 0)
    inputs = pack([(row, 40)], parts[0]._cache.page_size)
    threading.Timer(0.3, RanksC(memory, 1, 2).end).start()
    (found,) = together([partial(forward, parts[0], inputs)])
    assert isinstance(found, RankLost)
    assert all(isinstance(each, RankLost) for each in together([partial(forward, one, inputs) for one in parts]))


def spec_of(checkpoints: Checkpoints, kind: str, **changed: Any) -> ModelSpec:
    return replace(spec_from_config(read_config(checkpoints(kind))), **changed)


@pytest.mark.parametrize(
    ("kind", "changed", "count", "words"),
    [
        ("llama", {"heads": 14, "kv_heads": 2}, 4, "does not divide the 14 query heads; 1, 2 would work"),
        ("llama", {"heads": 12, "kv_heads": 6}, 4, "does not divide the 6 key/value heads; 1, 2 would work"),
        ("llama", {"intermediate_size": 90, "heads": 8, "kv_heads": 8}, 4, "the 90 inner dimensions of an MLP"),
        ("llama", {"vocab_size": 257}, 2, "the 257 rows of the head; 1 would work"),
        ("granite-hybrid", {}, 2, "a mixer of the kind mamba2 cannot be shared yet"),
        ("olmo2", {}, 2, "a norm over all heads cannot be shared yet"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_what_would_work(
    checkpoints: Checkpoints, kind: str, changed: dict[str, Any], count: int, words: str
) -> None:
    with pytest.raises(CannotShare, match=re.escape(words)):
        check(spec_of(checkpoints, kind, **changed), count)


def test_ranks_without_key_heads_of_their_own_share_them(checkpoints: Checkpoints) -> None:
    spec = spec_of(checkpoints, "llama", heads=8, kv_heads=2)
    check(spec, 4)
    assert (parts_of_kv(spec, 2), parts_of_kv(spec, 4)) == (2, 2)
    shares = [Share(rank, 4) for rank in range(4)]
    assert {(share.spec(spec).heads, share.spec(spec).kv_heads) for share in shares} == {(2, 1)}
    linears = mixer("attention").stored.linears(spec, spec.layers[0], LayerNames.of(spec, [], ""))
    kept = [share.cut("qkv", linears["qkv"], spec, spec.layers[0]).kept for share in shares]
    keys = [one[1].tolist() for one in kept if one is not None]
    assert keys[0] == keys[1] == list(range(spec.head_dim)) and keys[2] == keys[3] != keys[0]


@needs_library
@pytest.mark.parametrize("bits", ["gptq", "int8", "int4-g32"])
def test_parts_of_weights_in_few_bits_give_the_bits_of_the_whole_model(
    checkpoints: Checkpoints, tmp_path: Path, bits: str
) -> None:
    """A row keeps its scales and the order of its inputs."""
    folder, memory = Path(shutil.copytree(checkpoints("llama-biased"), tmp_path / "m")), AS_STORED
    if bits == "gptq":
        folder = rewrite(folder, gptq(act_order=True))
    else:
        memory = in_memory(None, bits, CPU)
    spec = spec_from_config(read_config(folder))
    whole = Decoder(spec, load(folder, spec, torch.bfloat16, CPU, invariant=True, memory=memory), 512)
    cache = cache_for(whole, tokens=512, kept="int8")
    shared = mmap.mmap(-1, shared_bytes(SMALL_ROUND))
    parts = []
    for share in (Share(0, 2), Share(1, 2)):
        weights = load(folder, spec, torch.bfloat16, CPU, invariant=True, memory=memory, share=share)
        decoder = Decoder(share.spec(spec), weights, 512)
        parts.append(PartDecoder(decoder, cache_for(decoder, tokens=512, kept="int8"), RanksC(shared, share.rank, 2)))
    rows = rows_for(cache, prompts_of(LENGTHS), 0)
    inputs = pack([(row, len(row.tokens)) for row in rows], cache.page_size)
    with torch.inference_mode():
        expected = fastest_decoder(whole, cache).forward(inputs, cache)
    assert all(torch.equal(found, expected) for found in together([partial(forward, one, inputs) for one in parts]))

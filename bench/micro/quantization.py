"""Measures the accuracy of quantized linears: compares the quantized demo model with the full one on questions.

python -m bench.micro.quantization [--dtype float32]

A format is a value of --quantization, or a checkpoint format of bench/micro/rounding.py.

The full model and the quantized ones predict every token of every question with its answer (demo_questions.toml). KL
is KL(full || quantized) of the predicted distributions, in nats; top-1 is the share of tokens where both have the same
most likely token.
"""

import argparse
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from torch import Tensor

import deploy.demo
from bench.micro.rounding import ROUNDINGS, RoundedSource
from bench.score import Score
from worker.checkpoint.checkpoint import read_config
from worker.kv_cache.tensors import KVCache
from worker.models.config import spec_from_config
from worker.models.decoder import Decoder
from worker.models.forward_inputs import ForwardInputs
from worker.models.load import Loader, load, open_source
from worker.ops.linear.packed import PackedLinear
from worker.quantization.methods import in_memory

DEMO = Path(deploy.demo.__file__).parent / "model"
QUESTIONS = Path(__file__).with_name("demo_questions.toml")
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
LONGEST, PAGE = 512, 32
CPU = torch.device("cpu")
FLAGS = ("none", "int8", "fp8", "int4", "int4-g32", "int8-dynamic", "fp8-dynamic")  # values of --quantization
FORMATS = (*FLAGS, *ROUNDINGS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = [_model(name, getattr(torch, args.dtype)) for name in FORMATS]
    scores = [Score() for _ in FORMATS]
    documents = list(_documents())
    for ids in documents:
        logits = [_logits(model, ids) for model in models]
        for score, own in zip(scores, logits, strict=True):
            score.add(logits[0].log_softmax(-1), own, ids[1:])
    full = scores[0].perplexity
    print(f"{len(documents)} documents, {scores[0].tokens} tokens, {args.dtype}")
    print("| linears | perplexity | change | KL, nats a token | top-1 the same |\n|---|--:|--:|--:|--:|")
    for name, score in zip(FORMATS, scores, strict=True):
        print(
            f"| {name} | {score.perplexity:.4f} | {score.perplexity / full - 1:+.3%} | {score.kl:.2e} "
            f"| {score.agreement:.2%} |"
        )


def _model(name: str, dtype: torch.dtype) -> Decoder:
    """Returns the demo model in a format, as the CPU runs it. Formats named -dynamic run as on a GPU."""
    spec, dynamic = spec_from_config(read_config(DEMO)), name.endswith("-dynamic")
    if name in ROUNDINGS:
        with closing(open_source(DEMO, None)) as source:
            rounded = RoundedSource(source, ROUNDINGS[name])
            return Decoder(spec, Loader(rounded, spec, dtype, CPU, invariant=True).load(), LONGEST)
    memory = in_memory(spec.stored, name, torch.device("cuda" if dynamic else "cpu"))
    with patch("worker.models.load.pack_quantized", _as_on_a_gpu):
        return Decoder(spec, load(DEMO, spec, dtype, CPU, invariant=True, memory=memory), LONGEST)


def _as_on_a_gpu(
    values: Tensor, scale: Tensor, bias: Tensor | None = None, *, invariant: bool, dynamic: bool, **_: object
) -> PackedLinear:
    """Packs a linear without widening its weights, so that the CPU quantizes activations per token, as a GPU does."""
    return PackedLinear(values, bias, invariant, scale=scale, dynamic=dynamic)


def _documents() -> Iterator[Tensor]:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    groups = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
    raw = groups.pop("raw")
    texts = [CHAT.format(*pair) for group in groups.values() for pair in group]
    for text in (*texts, *(f"{prompt} {answer}" for prompt, answer in raw)):
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:LONGEST]
        if len(ids) > 1:
            yield torch.tensor(ids)


def _logits(model: Decoder, ids: Tensor) -> Tensor:
    """Returns the logits after every token but the last, [T - 1, vocab] float32."""
    count = len(ids) - 1
    pages = -(-count // PAGE)
    cache = KVCache(model.spec, (pages,), PAGE, model.weights.embed.dtype, CPU)
    packed = ForwardInputs(
        token_ids=ids[:-1],
        positions=torch.arange(count),
        slot_mappings=(torch.arange(count),),
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        page_tables=(torch.arange(pages, dtype=torch.int32)[None],),
        logits_indices=torch.arange(count),
        max_kv_len=count,
        max_pages=(pages - 1,),
    )
    return model.forward(packed, cache)


if __name__ == "__main__":
    with torch.inference_mode():
        main()

"""Measures the cost of a grammar: its compilation, a mask, a token, and a step of the demo model with 8 sequences.

    python -m bench.micro.grammar

The vocabulary of 128,000 tokens is the demo's, extended by joining random pairs of its tokens. So token lengths are
realistic, and no large model is needed.
"""

import json
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from frontend.structured_output.grammar import json_schema
from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from shared.messages import Sampling
from worker.engine.build import Engine, load_engine
from worker.model_runner.grammar_mask import GrammarMask
from worker.scheduler.sequence import Row, Sequence
from worker.structured_output.compiler import Grammar, GrammarCompiler

DEMO = Path(__file__).parents[2] / "deploy" / "demo" / "model"
STEPS = 100
ENTRY = {"type": "object", "properties": {"id": {"type": "integer"}, "name": {"type": "string", "maxLength": 20},
         "ok": {"type": "boolean"}}, "required": ["id", "name", "ok"], "additionalProperties": False}  # fmt: skip
LIST = json_schema({"type": "array", "items": ENTRY, "minItems": 500}, "bench")


def widen(folder: Path, size: int) -> Path:
    """Writes the demo's tokenizer, extended to `size` tokens, to `folder`."""
    draw = random.Random(0)
    whole = json.loads((DEMO / "tokenizer.json").read_text())
    vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
    words = list(vocab)
    while len(vocab) < size:
        pair = [draw.choice(words), draw.choice(words)]
        word = "".join(pair)
        if len(word) < 14 and word not in vocab:
            vocab[word] = len(vocab)
            words.append(word)
            merges.append(pair)
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def masks(folder: Path, vocab: int) -> None:
    began = time.perf_counter()
    compiler = GrammarCompiler(folder, vocab, (2,))
    compiler._vocabulary.result()
    read = time.perf_counter()
    grammar = compiler.compile(LIST).result()
    print(f"{vocab} tokens: vocabulary {read - began:.2f} s, grammar {1e3 * (time.perf_counter() - read):.1f} ms")
    for rows in (1, 8, 64):
        fill, apply, advance = _rows(GrammarMask(vocab, (2,)), grammar, rows, vocab)
        print(f"  {rows:3d} rows: mask {fill:.0f} µs a row, with logits {apply:.0f}, advance {advance:.1f}")
    compiler.close()


def _rows(constrainer: GrammarMask, grammar: Grammar, rows: int, vocab: int) -> tuple[float, float, float]:
    """Returns median microseconds per row for three things: computing its mask; computing and applying the mask to
    logits; advancing by a random token."""
    draw = np.random.default_rng(0)
    matchers = [grammar.new_matcher() for _ in range(rows)]
    sequences = [Sequence((b"", i), [1], 1, Sampling(500), i, constraint=one) for i, one in enumerate(matchers)]
    places: list[Row] = [(sequence, 0, ()) for sequence in sequences]
    logits = torch.randn(rows, vocab)
    times: list[tuple[float, float, float]] = []
    for _ in range(STEPS):
        at = [time.perf_counter()]
        bits = constrainer._allowed(places, [*matchers])
        at.append(time.perf_counter())
        constrainer.apply(logits, places)
        at.append(time.perf_counter())
        tokens = [int(draw.choice(np.flatnonzero(row))) for row in np.unpackbits(bits, axis=1, bitorder="little")]
        at.append(time.perf_counter())
        for sequence, token in zip(sequences, tokens, strict=True):
            assert sequence.constraint is not None and sequence.constraint.accept(token)
        at.append(time.perf_counter())
        times.append((at[1] - at[0], at[2] - at[1], at[4] - at[3]))
    fill, apply, advance = (1e6 * float(np.median(column)) / rows for column in zip(*times, strict=True))
    return fill, apply, advance


def steps() -> None:
    """Times steps of the demo model with 8 sequences at temperature 1, alternately with and without a grammar."""
    engine = load_engine(ModelConfig(model=str(DEMO)), WorkerConfig(device="cpu", threads=1, kv_cache_gb=0.2))
    grammar = engine.compiler.compile(LIST).result()
    for turn in range(6):
        for name in ("free", "json_schema"):
            for i in range(8):
                sampling = Sampling(STEPS, temperature=1.0, ignore_eos=True)
                sequence = Sequence((bytes([turn]) + name.encode(), i), [5, 6, 7], 3, sampling, i)
                sequence.constraint = grammar.new_matcher() if name == "json_schema" else None
                engine.scheduler.submit(sequence, 0.0)
            print(f"  {name}: {_run(engine):.2f} ms a step of 8 (p10)")
    engine.compiler.close()


def _run(engine: Engine) -> float:
    spent = []
    while engine.scheduler.has_work:
        began = time.perf_counter()
        plan = engine.scheduler.plan(0.0)
        ids = engine.runner.step(plan).ids
        engine.scheduler.launched(plan)
        engine.scheduler.update(plan, ids, 0.0)
        spent.append(time.perf_counter() - began)
    return 1e3 * float(np.quantile(spent, 0.1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    masks(DEMO, 1792)
    with TemporaryDirectory() as folder:
        masks(widen(Path(folder), 128_000), 128_000)
    steps()

"""Predicts windows of text with one engine. Each run is a process, because a process cannot change its instruction set.

    python -m bench.real.predict compare BASE COUNT --model MODEL [flags of `sluice worker`]

`compare` predicts COUNT evenly spread windows of the file BASE, and prints, as JSON, how close the predictions are to
the log-probabilities in BASE. `write` writes BASE for the windows in BASE.json. `transformers` does the same as
`compare` with the transformers library in float32, for a safetensors checkpoint.
"""

import json
import math
import os
import sys
from array import array
from collections.abc import Callable
from pathlib import Path

from shared.config.declaration import ConfigError
from shared.config.flags import Parser, add_flags, read, select
from shared.config.settings import Settings
from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from bench.real.base_file import ROWS_AT_ONCE, BaseFile, Window, first_predicted, without_tail, write  # noqa: E402
from bench.score import Score  # noqa: E402
from shared.messages import Sampling  # noqa: E402
from worker.device import threads_of  # noqa: E402
from worker.engine.build import Engine, load_engine  # noqa: E402
from worker.model_runner.inputs import build_inputs, dummy_sequence  # noqa: E402
from worker.ops import native as c_library  # noqa: E402
from worker.scheduler.sequence import (  # noqa: E402
    Chunk,
    PromptScores,
)

SCORED = Sampling(1, temperature=0.0, prompt_logprobs=True)
CPU = torch.device("cpu")

Predict = Callable[[Window], Tensor]


@torch.inference_mode()
def main(words: list[str]) -> None:
    flags = select(("model", "worker"))
    parser = Parser(prog="python -m bench.real.predict", description=__doc__)
    parser.add_argument("what", choices=("write", "compare", "transformers"))
    parser.add_argument("base", type=Path)
    parser.add_argument("count", type=int)
    add_flags(parser, flags)
    try:
        args = parser.read(words)
        settings = read(args, os.environ, flags)
    except ConfigError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    if args.what == "transformers":
        torch.set_num_threads(threads_of(settings.worker))
        print(json.dumps(compare(BaseFile.open(args.base), args.count, _transformers(settings))))
        return
    engine = _loaded(settings)
    predict = _engine(engine)
    if args.what == "write":
        windows = json.loads(args.base.with_suffix(".json").read_text())
        write(args.base, windows, engine.spec.vocab_size, map(predict, windows))
        return
    print(json.dumps(compare(BaseFile.open(args.base), args.count, predict) | {"kernels": c_library.tier()}))


def loaded(settings: Settings) -> Predict:
    """Returns a function that computes the logits that `compare` needs, with a new engine. Raises ConfigError or
    CheckpointError."""
    return _engine(_loaded(settings))


def _loaded(settings: Settings) -> Engine:
    torch.set_num_threads(threads_of(settings.worker))
    return load_engine(settings.model, settings.worker)


def compare(base: BaseFile, count: int, predict: Predict) -> dict[str, float]:
    """Predicts `count` evenly spread windows of a base file, and compares the predictions with the file's.

    `error` is the standard error of ln(perplexity / full), from the differences at each token. Both sides of a
    difference are at least the file's least number in that row, since the file holds nothing less likely.
    """
    score, full = Score(), 0.0
    differences: list[Tensor] = []
    for at in range(count):
        index = at * len(base.windows) // count
        window = base.windows[index]
        ids, logits = torch.tensor(window[first_predicted(len(window)) + 1 :]), predict(window)
        for first in range(0, len(ids), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            known = base.log_probabilities(index, first, first + ROWS_AT_ONCE)
            score.add(without_tail(known), logits[rows], ids[rows])
            theirs = known.gather(1, ids[rows, None]).double()
            full -= theirs.sum().item()
            ours = logits[rows].log_softmax(-1).gather(1, ids[rows, None])
            differences.append(theirs - torch.maximum(ours, known.amin(1, keepdim=True)))
    return {
        "tokens": count * len(base.windows[0]), "predicted": score.tokens, "perplexity": score.perplexity,
        "full": math.exp(full / score.tokens), "kl": score.kl, "agreement": score.agreement,
        "error": (torch.cat(differences).std() / math.sqrt(score.tokens)).item(),
    }  # fmt: skip


def _engine(engine: Engine) -> Predict:
    """Returns a function that computes a window in one step, as the worker computes a prompt that is scored."""
    size, runner = engine.size, engine.runner

    def predict(window: Window) -> Tensor:
        sequence = dummy_sequence(window, size.page_size, len(size.groups), SCORED)
        sequence.scores = PromptScores(first_predicted(len(window)) + 1)
        sequence.pages = [array("i", range(1, 1 + len(pages))) for pages in sequence.pages]
        if any(len(own) >= known for own, known in zip(sequence.pages, size.pages, strict=True)):
            raise SystemExit(f"--kv-cache-gb is too small for a window of {len(window)} tokens")
        inputs, _ = build_inputs([Chunk(sequence, 0, len(window), False)], size.page_size, CPU)
        runner._cache.reach(inputs.max_pages)
        return runner._forward(inputs)  # called directly, because the worker's loop gives no access to logits

    return predict


def _transformers(settings: Settings) -> Predict:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(settings.model.model, dtype=torch.float32)

    def predict(window: Window) -> Tensor:
        logits: Tensor = model(torch.tensor([window])).logits[0]
        return logits[first_predicted(len(window)) : -1]

    return predict


if __name__ == "__main__":
    main(sys.argv[1:])

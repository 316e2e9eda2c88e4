"""Measures the engine alone, without HTTP, scheduler or sampling parameters: reads what to measure from stdin.

    echo "prefill 1024
    decode 8" | python -m bench.micro.engine --model FOLDER [flags of `sluice worker`]

The first line of output says what was loaded; each further line has the tokens per second of one line of input, as
JSON. `prefill N` computes a prompt of N tokens. `decode N` computes DECODE_STEPS steps of N sequences, each after a
prompt of PROMPT tokens, or of D tokens with `decode N D`. With `--pipeline-parallel-size P`, P steps are in flight:
those of chunks of the prompt, or of P batches that share the sequences.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable

from shared.config.declaration import ConfigError
from shared.config.flags import Parser, add_flags, read, select
from shared.config.settings import Settings
from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import torch  # noqa: E402

from worker.device import threads_of  # noqa: E402
from worker.engine import trial  # noqa: E402
from worker.engine.build import Engine, load_engine  # noqa: E402
from worker.model_runner.step import AnyStep  # noqa: E402
from worker.ops import native as c_library  # noqa: E402
from worker.scheduler.sequence import Chunk, Plan, Sequence  # noqa: E402

PROMPT, DECODE_STEPS, PREFILL_CHUNK = 128, 12, 512


def main(words: list[str]) -> None:
    flags = select(("model", "worker"))
    parser = Parser(prog="python -m bench.micro.engine", description=__doc__)
    add_flags(parser, flags)
    try:
        settings = read(parser.read(words), os.environ, flags)
    except ConfigError as error:
        raise SystemExit(f"{parser.prog}: {error}") from error
    torch.set_num_threads(threads_of(settings.worker))
    begun = time.perf_counter()
    engine = load_engine(settings.model, settings.worker)
    _say(
        loaded_s=round(time.perf_counter() - begun, 1),
        resident_gb=_resident_gb(),
        isa=c_library.tier(),
        **_what(settings),
    )
    for line in sys.stdin:
        kind, *counts = line.split()
        _say(tokens_s=MEASURES[kind](engine, *map(int, counts)))


def prefill(engine: Engine, tokens: int) -> float:
    """Returns the tokens per second of one prompt of `tokens` tokens, computed in chunks."""
    [sequence] = _sequences(engine, 1, tokens)
    starts = range(0, tokens, PREFILL_CHUNK)
    chunks = [Chunk(sequence, at, min(PREFILL_CHUNK, tokens - at), at + PREFILL_CHUNK >= tokens) for at in starts]
    begun = time.perf_counter()
    _compute(engine, [Plan([chunk]) for chunk in chunks], engine.stages)
    return tokens / (time.perf_counter() - begun)


def decode(engine: Engine, count: int, prompt: int = PROMPT) -> float:
    """Returns the decode tokens per second of `count` sequences together, each after `prompt` tokens."""
    return decode_of(engine, decoding(engine, count, prompt))


def decoding(engine: Engine, count: int, prompt: int = PROMPT) -> list[Sequence]:
    """Returns sequences for `decode_of`. Their prompts of `prompt` tokens count as computed."""
    return _sequences(engine, count, prompt + DECODE_STEPS + 1)


def decode_of(engine: Engine, sequences: list[Sequence], clock: Callable[[], float] = time.perf_counter) -> float:
    """Decodes these sequences together and returns the tokens per second."""
    prompt = len(sequences[0].tokens) - DECODE_STEPS - 1
    batches = [batch for first in range(engine.stages) if (batch := sequences[first :: engine.stages])]
    steps = [
        [Plan([Chunk(sequence, at, 1, True) for sequence in batch]) for batch in batches]
        for at in range(prompt, prompt + DECODE_STEPS + 1)
    ]
    _compute(engine, steps[0], len(batches))
    begun = clock()
    _compute(engine, [plan for plans in steps[1:] for plan in plans], len(batches))
    return len(sequences) * DECODE_STEPS / (clock() - begun)


def _compute(engine: Engine, plans: list[Plan], most: int) -> None:
    """Computes the steps in order. most: how many are in flight at most"""
    in_flight = deque[AnyStep]()
    for plan in plans:
        in_flight.append(engine.runner.launch(plan))
        while len(in_flight) >= most:
            in_flight.popleft().read()
    while in_flight:
        in_flight.popleft().read()


MEASURES: dict[str, Callable[..., float]] = {"prefill": prefill, "decode": decode}


def _sequences(engine: Engine, count: int, length: int) -> list[Sequence]:
    return trial.decoding(engine.runner, engine.size, engine.spec.vocab_size, count, length)


def _what(settings: Settings) -> dict[str, object]:
    return {"model": settings.model.name, "threads": torch.get_num_threads()}


def _resident_gb() -> float:
    with open("/proc/self/statm") as file:
        return round(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9, 2)


def _say(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Compares what `sluice run --dry-run` predicts with what is then measured: `python -m bench.real.forecasts MODEL ...`.

A round tries layers of the model, as the prediction does, and at once asks the running server for one answer. Before,
between and after, all cores read memory: on a virtual machine its speed changes with the neighbours from one second to
the next, and a prediction cannot know that. So a round is steady if the three readings are alike, and the table has
both the steady rounds and all. Memory is that of the server's processes after the first answer, without the K/V pool.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import torch  # noqa: E402

from bench.client.load_client import Call, Target, run  # noqa: E402
from bench.client.server import BenchError, served  # noqa: E402
from bench.packages import psutil  # noqa: E402
from deploy.cli.run import judge_local  # noqa: E402
from deploy.cli.verdict import Forecast  # noqa: E402
from deploy.launcher.child_command import CliError  # noqa: E402
from shared.config.declaration import ConfigError  # noqa: E402
from shared.config.flags import Parser, positive_int  # noqa: E402
from shared.config.settings import Settings  # noqa: E402
from shared.machine import usable_cores  # noqa: E402
from worker.ops import native as c_library  # noqa: E402
from worker.ops.roofline import reading  # noqa: E402

KV_GB = 0.25  # the K/V pool, which the server touches as a whole while it answers for the first time
FLAGS = ("--speculation", "off", "--store", "none", "--kv-cache-gb", str(KV_GB))
PROMPT = "A lighthouse stood where the coast turned north. " * 90  # about 900 tokens
TOKENS = 150  # of an answer
MEMORY = 512 << 20  # bytes that a reading reads
ALIKE = 1.15  # how far the readings of a steady round are apart, at most
HEAD = (
    "| model | memory: predicted, GB | measured | tokens/s: predicted ÷ measured, steady rounds | all rounds "
    "| predicted, tokens/s | measured |\n|---|--:|--:|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Round:
    """Tokens/s as predicted and measured, and what memory gave before, between and after, in GB/s."""

    predicted: float
    measured: float
    memory: tuple[float, float, float]

    @property
    def steady(self) -> bool:
        return max(self.memory) <= ALIKE * min(self.memory)

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.real.forecasts", description="Compares predictions with measurements.")
    parser.add_argument("models", nargs="+", metavar="MODEL", help="smollm2, a folder, or a GGUF file")
    parser.add_argument("--rounds", type=positive_int, default=8, metavar="N", help="[default %(default)s]")
    try:
        args = parser.read(words)
        rows = [compared(model, args.rounds) for model in args.models]
    except (ConfigError, BenchError, CliError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print("\n".join([HEAD, *rows]))
    return 0


def compared(model: str, rounds: int) -> str:
    """Returns the row of a model. Raises BenchError or CliError."""
    memory_gb_s = reader()
    with served(model, FLAGS) as target:
        asked(target)  # warms up
        resident = sum(process.memory_full_info().pss for process in psutil.Process().children(recursive=True))
        found = []
        for _ in range(rounds):
            before, told, between = memory_gb_s(), forecast(model), memory_gb_s()
            measured, tokens = asked(target)
            predicted = told.tokens_per_s(None, tokens)
            if predicted is None:
                raise BenchError(f"the speed of {model} is not tried")
            found.append(Round(predicted, measured, (before, between, memory_gb_s())))
            print(f"{model}: {found[-1]}", file=sys.stderr, flush=True)
    steady = [one for one in found if one.steady]
    memory = f"{(told.weights + told.processes) / 1e9:.2f} | {resident / 1e9 - KV_GB:.2f}"
    return (
        f"| {Path(model).name} | {memory} | {_spread(steady)} "
        f"| {_spread(found)} | {median(one.predicted for one in found):.0f} "
        f"| {median(one.measured for one in found):.0f} |"
    )


def reader() -> Callable[[], float]:
    """Returns a function that reads memory with all cores and returns the speed in GB/s."""
    if c_library.library() is None:
        raise BenchError("the C library is missing, so the speed of memory cannot be measured")
    read = reading(c_library.huge_pages(torch.empty(MEMORY, dtype=torch.uint8)).fill_(1), usable_cores())

    def gb_s() -> float:
        begun = perf_counter()
        read()
        return MEMORY / (perf_counter() - begun) / 1e9

    return gb_s


def forecast(model: str) -> Forecast:
    found = judge_local(model, Settings(), timed=True).forecast
    if found is None:
        raise BenchError(f"nothing can be predicted for {model}")
    return found


def asked(target: Target) -> tuple[float, int]:
    """Returns the tokens/s of an answer after its first token, and how many tokens the sequence had in its middle."""
    (record,) = asyncio.run(run(target, [Call(0.0, PROMPT, TOKENS)]))
    if record.error:
        raise BenchError(record.error)
    return 1 / record.per_token, record.prompt_tokens + TOKENS // 2


def _spread(rounds: list[Round]) -> str:
    if not rounds:
        return "none"
    ratios = [one.ratio for one in rounds]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)})"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Measures draws and log-probabilities on a CPU, in C and in PyTorch: `python -m bench.micro.sampling [--rounds 20]`.

Prints a Markdown table of microseconds for one row: the least processor time of the thread. Logits are random numbers;
`flat` is the worst case, where top-p keeps most of the vocabulary.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from worker.ops.sampling.native import logprobs_native, sample_native
from worker.ops.sampling.reference import PlainParams, Stages, logprobs_torch, sample_torch

VOCABULARIES = (49_152, 151_936, 262_144)
# name → temperature, top-k, top-p, min-p
DRAWS = {
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "top-k 20, top-p 0.8": (0.7, 20, 0.8, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "flat, top-p 0.9": (50.0, 0, 0.9, 0.0),
}
TOP = 5


def least(call: Callable[[], object], rounds: int) -> float:
    """Returns the least microseconds of processor time of a call."""
    times = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        call()
        times.append(time.thread_time_ns() - began)
    return min(times) / 1e3


def drawing(logits: torch.Tensor, asked: tuple[float, int, float, float]) -> tuple[PlainParams, Stages]:
    temperature, top_k, top_p, min_p = asked
    params = PlainParams(
        torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]),
        torch.tensor([7]), torch.tensor([3]),
    )  # fmt: skip
    return params, Stages(any_greedy=False, any_top_k=top_k > 0, any_top_p=top_p < 1, any_min_p=min_p > 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| vocabulary | | in C | in PyTorch | ratio |")
    print("|--:|---|--:|--:|--:|")
    for width in VOCABULARIES:
        logits = 3 * torch.randn(1, width, generator=torch.Generator().manual_seed(1))
        calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        for name, asked in DRAWS.items():
            how = drawing(logits, asked)
            calls[name] = partial(sample_native, logits, *how), partial(sample_torch, logits, *how)
        scored = logits, torch.tensor([5]), TOP
        calls[f"log-probabilities, {TOP} likeliest"] = (
            partial(logprobs_native, *scored),
            partial(logprobs_torch, *scored),
        )
        for name, (native, plain) in calls.items():
            ours, theirs = least(native, rounds), least(plain, rounds)
            print(f"| {width:,} | {name} | {ours:.0f} | {theirs:.0f} | {theirs / ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()

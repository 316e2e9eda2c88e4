"""Measures the time to compare two ranks: their residual streams in every step, and their weights at start.

    python -m bench.ranks.checks --model FOLDER

Two processes exchange checksums of rows as wide as the model's hidden size. Then this process loads rank 0's share of
the weights, and reads the other rank's share, as rank 0 does at start.
"""

import argparse
import mmap
import os
import statistics
import time

import torch

from shared.config.settings import ModelConfig
from shared.config.worker import WorkerConfig
from worker.distributed.checks import checksum, checksums, checksums_from_checkpoint, differing
from worker.engine.load_model import find_model
from worker.models.load import load
from worker.models.sharding import Share
from worker.ops.exchange import RanksC, shared_bytes

ROUNDS = 300
ROWS = (1, 8, 32, 512)
MOST_LOGITS = 32  # maximum number of rows per step whose logits are computed


def seconds_of_check(ranks: RanksC, rows: int, width: int) -> float:
    """Returns the median seconds in which a rank compares a step of `rows` rows."""
    stream = torch.randn(rows, width).bfloat16()
    normed = stream[:MOST_LOGITS].clone()
    took = []
    for _ in range(ROUNDS):
        ranks.gather(torch.zeros(1, 1, dtype=torch.int64))  # synchronizes the two ranks
        begun = time.perf_counter()
        own = checksum(normed, checksum(stream))
        differing(ranks.gather(torch.tensor([[own]])).flatten().tolist())
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def compare_steps(width: int) -> None:
    memory = mmap.mmap(-1, shared_bytes(1 << 16))
    torch.set_num_threads(1)  # a process with more than one thread must not fork
    child = os.fork()
    ranks = RanksC(memory, 0 if child else 1, 2)
    found = {rows: seconds_of_check(ranks, rows, width) for rows in ROWS}
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for rows, seconds in found.items():
        print(f"{rows:4} rows of {width}: {seconds * 1e6:.0f} µs a step")


def compare(model: str, dtype: str) -> None:
    worker = WorkerConfig(device="cpu", dtype=dtype, tensor_parallel_size=2)
    files = find_model(ModelConfig(model=model), worker, torch.device("cpu"))
    compare_steps(files.spec.hidden_size)
    share, begun = Share(0, 2), time.perf_counter()
    formats = files.formats
    weights = load(
        files.folder, files.spec, formats.dtype, files.device, invariant=True, memory=formats.memory, share=share
    )
    loaded = time.perf_counter()
    checksums(weights)
    summed = time.perf_counter()
    checksums_from_checkpoint(files.stored(worker), share.next, lambda: None)
    end = time.perf_counter()
    print(f"own part: loaded in {loaded - begun:.2f} s, checksums in {summed - loaded:.2f} s")
    print(f"part of the next rank: read with checksums in {end - summed:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.checks", description=__doc__)
    parser.add_argument("--model", required=True, help="a checkpoint's folder")
    parser.add_argument("--dtype", default="bfloat16")
    asked = parser.parse_args()
    compare(asked.model, asked.dtype)


if __name__ == "__main__":
    main()

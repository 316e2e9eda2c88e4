"""Measures decode speed with LoRA adapters relative to the base model, in rounds that alternate within one process.

    python -m bench.micro.adapters [--model qwen3-0.6b] [--ranks 16,64] [--adapters 1,8] [--sequences 1,8,32]

Each adapter changes every linear of every layer. The sequences of a step use the adapters in turn. With `--threads 1`,
CPU time is measured, because other programs disturb it less.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from shared.config.flags import positive_int
from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import torch  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from bench.checkpoints import checkpoint  # noqa: E402
from bench.micro.engine import decode_of, decoding  # noqa: E402
from shared.config.settings import ModelConfig  # noqa: E402
from shared.config.worker import WorkerConfig  # noqa: E402
from shared.lora import read_files  # noqa: E402
from shared.messages import Adapter  # noqa: E402
from worker.engine.build import Engine, load_engine  # noqa: E402
from worker.lora.loaded import LoadedAdapter, load_adapter  # noqa: E402
from worker.lora.target_modules import sites_of  # noqa: E402
from worker.scheduler.sequence import AdapterUse  # noqa: E402

CPU = torch.device("cpu")
CLOCKS = (time.perf_counter, time.thread_time)  # the clock for several threads, and the clock for one thread


def write_adapter(base: Path, folder: Path, rank: int, seed: int, size: float = 0.01) -> Path:
    """Writes a random bfloat16 adapter for all linears in a checkpoint's layers. size: standard deviation of its
    weights"""
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for file in sorted(base.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                shape = opened.get_slice(name).get_shape()
                if ".layers." not in name or len(shape) != 2:
                    continue
                outputs, inputs = shape
                module = f"base_model.model.{name.removesuffix('.weight')}"
                for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    drawn = torch.randn(shape, generator=draw) * size
                    tensors[f"{module}.lora_{letter}.weight"] = drawn.bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def speeds(engine: Engine, count: int, adapters: list[LoadedAdapter], rounds: int) -> tuple[list[float], list[float]]:
    """Returns the tokens per second of each round without adapters, and of each round with them. The two kinds
    alternate."""
    sequences, clock = decoding(engine, count), CLOCKS[torch.get_num_threads() == 1]
    uses = [AdapterUse(Adapter(str(id(one)), "", one.sha256), one) for one in adapters]
    without, with_them = [], []
    for _ in range(rounds):
        for sequence in sequences:
            sequence.adapter = None
        without.append(decode_of(engine, sequences, clock))
        for at, sequence in enumerate(sequences):
            sequence.adapter = uses[at % len(uses)]
        with_them.append(decode_of(engine, sequences, clock))
    return without, with_them


def _numbers(text: str) -> list[int]:
    return [positive_int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of bench/checkpoints.py")
    parser.add_argument("--ranks", type=_numbers, default="16,64")
    parser.add_argument("--adapters", type=_numbers, default="1,8")
    parser.add_argument("--sequences", type=_numbers, default="1,8,32")
    parser.add_argument("--rounds", type=positive_int, default=7)
    parser.add_argument("--threads", type=positive_int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = checkpoint(args.model)
    engine = load_engine(ModelConfig(model=str(base)), WorkerConfig(device="cpu", kv_cache_gb=1.0))
    assert engine.weights is not None
    sites = sites_of(base, engine.spec, engine.weights)
    print("| rank | adapters | sequences | tokens/s without | with | share |\n|--:|--:|--:|--:|--:|--:|")
    for rank in args.ranks:
        with tempfile.TemporaryDirectory() as room:
            folders = [write_adapter(base, Path(room) / str(seed), rank, seed) for seed in range(max(args.adapters))]
            loaded = [load_adapter(read_files(str(each)), sites, torch.bfloat16, CPU, rank) for each in folders]
        for adapters in args.adapters:
            for count in args.sequences:
                without, with_them = speeds(engine, count, loaded[:adapters], args.rounds)
                ratios = [one / other for one, other in zip(with_them, without, strict=True)]
                print(
                    f"| {rank} | {min(adapters, count)} | {count} | {statistics.median(without):.1f} | "
                    f"{statistics.median(with_them):.1f} | {statistics.median(ratios):.3f} "
                    f"({min(ratios):.3f} to {max(ratios):.3f}) |",
                    flush=True,
                )


if __name__ == "__main__":
    main()

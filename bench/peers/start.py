"""Compares how long servers take from the command to the first token, and the memory they then use.

    python -m bench.peers.start [--shape llama-8b] [--weights q4_k_m] [--also="--weights-cache DIR"]

Each server starts cold (the files of weights are dropped from the system's page cache) and then warm, alone on the
machine. The prompt has 128 tokens. Memory is the proportional set size of all processes of the server.
"""

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from bench.checkpoints import ALL_SHAPES, cache_folder, checkpoint
from bench.client.load_client import Call, run
from bench.client.server import BenchError
from bench.client.summary import aligned, number
from bench.packages import psutil
from bench.peers.catalog import PEERS, Peer, configured, in_weights
from bench.peers.llama_cpp import ANY_WEIGHTS, ISAS, gguf
from bench.peers.scenarios import PROMPT, Prompts
from bench.peers.servers import install, launched, process_tree, wait_until_alive
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated

COMPARED = ("sluice", "llama.cpp")
# A small K/V pool, so that it fits beside large weights. If a flag is given twice, the last value counts.
POOL = {"llama.cpp": ["-c", "4096", "-np", "4"]}
OUR_POOL = ["--kv-cache-gb", "0.5"]


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.peers.start", description="Compares the time from command to first token.")
    add = parser.add_argument
    add("--shape", choices=sorted(ALL_SHAPES), default="llama-8b")
    add("--weights", choices=ANY_WEIGHTS, default="q4_k_m")
    add("--isa", choices=ISAS, default="best")
    add("--safetensors", action="store_true", help="Sluice reads the bfloat16 checkpoint with --quantization")
    add("--peers", type=comma_separated(COMPARED), default=",".join(COMPARED), metavar="NAME,...")
    add("--also", type=configured, action="append", default=[], metavar='"--flag value ..."',
        help="start another Sluice with these flags; may be repeated")  # fmt: skip
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which the servers are installed")
    add("--models", type=Path, default=cache_folder(), help="folder of the checkpoints")
    try:
        print(compare(parser.read(words)))
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.peers.start: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def compare(args: Namespace) -> str:
    """Starts every server twice and returns the table in Markdown. Raises BenchError."""
    root, folder = args.root.absolute(), checkpoint(args.shape, args.models.absolute())
    rows = [[f"{args.shape}, {args.weights}, {args.isa}", "answers, s", "first token, s", "memory, GB"]]
    for peer in [*(PEERS[name] for name in args.peers), *args.also]:
        peer = with_small_pool(in_weights(peer, args.weights, args.isa, args.safetensors))
        install(peer, root, folder)
        for state in ("cold", "warm"):
            if state == "cold":
                drop_from_page_cache(_files(folder, args.weights))
            figures = start(peer, root, folder)
            rows.append([f"{peer.name}, {state}", *map(number, figures)])
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return aligned(rows)


def with_small_pool(peer: Peer) -> Peer:
    words = POOL.get(peer.name, OUR_POOL)
    return replace(peer, serve=lambda root, folder, port: [*peer.serve(root, folder, port), *words])


def start(peer: Peer, root: Path, folder: Path) -> tuple[float, float, float]:
    """Returns the seconds until the server answers, the seconds until the first token, and the memory then, in GB."""
    prompts = Prompts(Tokenizer.from_file(str(folder / "tokenizer.json")), f"start {time.time()}")
    begun = time.perf_counter()
    with launched(peer, root, folder) as (target, process):
        wait_until_alive(peer, target, process)
        answers = time.perf_counter() - begun
        (record,) = asyncio.run(run(target, [Call(0.0, prompts.text(PROMPT), 2)]))
        if record.error and not record.stamps:
            raise BenchError(f"{peer.name}: {record.error}")
        memory = sum(_memory(one) for one in process_tree(process))
    return answers, answers + record.ttft, memory / 1e9


def drop_from_page_cache(files: Iterator[Path]) -> None:
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(folder: Path, weights: str) -> Iterator[Path]:
    yield from folder.glob("*.safetensors")
    if gguf(folder, weights).exists():
        yield gguf(folder, weights)


def _memory(process: psutil.Process) -> int:
    return int(process.memory_full_info().pss)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

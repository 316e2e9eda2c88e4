"""Compares decode with LoRA adapters between servers that already run and support llama.cpp's `/completion`.

    python -m bench.peers.adapters write MODEL.gguf FOLDER [--rank 16] [--adapters 8]
    python -m bench.peers.adapters compare http://127.0.0.1:8000 http://127.0.0.1:8080 [--streams 1,8,32]

`write` makes random adapters for all linears in the layers of a GGUF model, as 0.gguf, 1.gguf, … in FOLDER. Give them
to both servers in this order: `--lora-modules 0=FOLDER/0.gguf …` or `--lora FOLDER/0.gguf …`.

`compare` measures three cases: no adapter, all streams with the first adapter, and streams with the adapters in turn.
Servers alternate. Figures are tokens per second of all streams together, while all streams run: from the last stream's
first token until a stream ends. Shares are relative to the same server without an adapter.
"""

import json
import sys
import time
import urllib.request
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import gguf
import numpy as np

from bench.client.server import BenchError
from bench.client.summary import aligned
from shared.config.flags import positive_int

PROMPT_TOKENS, TOKENS, TIMEOUT_S = 32, 64, 600.0
DEVIATION = 0.01


def write(model: Path, folder: Path, rank: int, count: int) -> None:
    """Writes `count` random adapters in 16 bits for all matrices in the layers of a GGUF model."""
    base = gguf.GGUFReader(model)
    name = str(base.fields["general.architecture"].contents())
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        random = np.random.default_rng(index)
        file = gguf.GGUFWriter(folder / f"{index}.gguf", name)
        file.add_type("adapter")
        file.add_string("adapter.type", "lora")
        file.add_float32("adapter.lora.alpha", float(rank))
        for tensor in base.tensors:
            if not tensor.name.startswith("blk.") or len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
                continue
            inputs, outputs = map(int, tensor.shape)
            for letter, shape in (("a", (rank, inputs)), ("b", (outputs, rank))):
                drawn = random.standard_normal(shape, np.float32) * DEVIATION
                file.add_tensor(f"{tensor.name}.lora_{letter}", drawn.astype(np.float16))
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()


def times(url: str, seed: int, adapter: int | None, adapters: int) -> list[float]:
    """Returns the arrival time of each token of an answer. Raises BenchError. adapter: None for the base model"""
    prompt = np.random.default_rng(seed).integers(100, 1000, PROMPT_TOKENS).tolist()
    lora = [{"id": one, "scale": float(one == adapter)} for one in range(adapters)]
    asked = {"prompt": prompt, "n_predict": TOKENS, "ignore_eos": True, "stream": True, "lora": lora, "seed": seed}
    request = urllib.request.Request(
        f"{url}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    found = []
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    chunk: dict[str, Any] = json.loads(line[6:])
                    found += [time.perf_counter()] * (0 if chunk["stop"] else 1)
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"{url}: {error}") from error
    if len(found) < TOKENS // 2:
        raise BenchError(f"{url}: an answer has only {len(found)} chunks of text")
    return found


def rate(url: str, streams: int, used: int, adapters: int, seed: int) -> float:
    """Returns the tokens per second of all streams. used: number of adapters that the streams use; 0: the base model"""
    with ThreadPoolExecutor(streams) as pool:
        jobs = [pool.submit(times, url, seed + one, one % used if used else None, adapters) for one in range(streams)]
        each = [job.result() for job in jobs]
    begin, end = max(one[0] for one in each), min(one[-1] for one in each)
    if begin >= end:  # the streams never all ran at once: count all tokens over the whole time
        begin, end = min(one[0] for one in each), max(one[-1] for one in each)
    return sum(begin < token <= end for one in each for token in one) / (end - begin)


def compare(urls: list[str], streams: list[int], rounds: int) -> str:
    """Returns the table in Markdown. Raises BenchError if a server does not answer."""
    adapters = []
    for url in urls:
        with urllib.request.urlopen(f"{url}/lora-adapters", timeout=TIMEOUT_S) as answer:
            adapters.append(len(json.load(answer)))
    rows = [["streams", "server", "base", "one adapter", "share", f"{max(adapters)} adapters", "share"]]
    for count in streams:
        found: list[list[list[float]]] = [[[], [], []] for _ in urls]
        for turn in range(rounds):
            for place, url in enumerate(urls):
                for kind, used in enumerate((0, 1, adapters[place])):
                    if used <= max(1, count):
                        found[place][kind].append(rate(url, count, used, adapters[place], 1000 * turn + 100 * kind))
        for place, url in enumerate(urls):
            base, one, many = (median(each) if each else 0.0 for each in found[place])
            shares = [f"{one / base:.2f}", f"{many:.1f}" if many else "", f"{many / base:.2f}" if many else ""]
            rows.append([str(count), url, f"{base:.1f}", f"{one:.1f}", *shares])
            print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    return aligned(rows)


def main(words: list[str]) -> int:
    parser = ArgumentParser(
        prog="python -m bench.peers.adapters", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("model", type=Path)
    writing.add_argument("folder", type=Path)
    writing.add_argument("--rank", type=positive_int, default=16)
    writing.add_argument("--adapters", type=positive_int, default=8)
    comparing = commands.add_parser("compare")
    comparing.add_argument("urls", nargs="+")
    comparing.add_argument(
        "--streams", type=lambda text: [positive_int(one) for one in text.split(",")], default="1,8,32"
    )
    comparing.add_argument("--rounds", type=positive_int, default=3)
    args: Namespace = parser.parse_args(words)
    if args.command == "write":
        write(args.model, args.folder, args.rank, args.adapters)
        return 0
    try:
        print(compare(args.urls, args.streams, args.rounds))
    except BenchError as error:
        print(f"python -m bench.peers.adapters: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

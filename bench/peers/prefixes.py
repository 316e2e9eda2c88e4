"""Compares how soon the first token of a long prompt comes that a server has seen before.

    python -m bench.peers.prefixes [--shape qwen3-0.6b,qwen3.5-0.8b] [--tokens 8000]

Sluice keeps K/V in memory and in --kv-store, once in /dev/shm and once in a folder on a disk. llama.cpp keeps it in its
slot and in --cache-ram, and saves a slot to a file. Files on the disk are dropped from the system's page cache before
they are read. Servers run one at a time. After a restart, a short prompt is computed first.
"""

import asyncio
import json
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer

from bench.checkpoints import ALL_SHAPES, cache_folder, chosen, gguf_model
from bench.client.load_client import Call, Target, run
from bench.client.server import BenchError
from bench.client.summary import aligned, number
from bench.peers.catalog import PEERS, Peer, in_weights
from bench.peers.llama_cpp import ANY_WEIGHTS
from bench.peers.scenarios import Prompts
from bench.peers.servers import install, launched, wait_until_alive
from bench.peers.start import drop_from_page_cache
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, positive_int

HEAD = ["model", "server", "K/V is", "first token, s", "of computing it"]
SHORT = 300  # tokens of the prompt after a restart
NEW = 4
SLOT = "slot.bin"
Rows = Iterator[tuple[str, float]]


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.peers.prefixes", description="Compares first tokens of known prompts.")
    add = parser.add_argument
    add("--shape", type=comma_separated(ALL_SHAPES), default="qwen3-0.6b", metavar="NAME,...")
    add("--file", type=gguf_model, action="append", default=[], metavar="FILE",
        help="instead of --shape and --weights: this GGUF file; may be repeated")  # fmt: skip
    add("--weights", type=comma_separated(ANY_WEIGHTS), default="bf16", metavar="NAME,...")
    add("--tokens", type=positive_int, default=8000, metavar="N", help="of the prompt [default %(default)s]")
    add("--disk", type=Path, default=cache_folder(), help="folder on a disk [default %(default)s]")
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which llama.cpp is built")
    add("--models", type=Path, default=cache_folder(), help="folder of the checkpoints")
    try:
        args = parser.read(words)
        table = [HEAD]
        for folder, weights in chosen(args, args.models.absolute()):
            for row in compare(folder, weights, args.tokens, args.disk.absolute(), args.root.absolute()):
                table.append([folder.name, *row])
                print(" ".join(table[-1]), file=sys.stderr, flush=True)
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.peers.prefixes: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(aligned(table))
    return 0


def compare(folder: Path, weights: str, tokens: int, disk: Path, root: Path) -> Iterator[list[str]]:
    """Yields the table's rows without the model's name. Raises BenchError."""
    prompts = Prompts(Tokenizer.from_file(str(folder / "tokenizer.json")), f"prefixes of {folder.name}")
    text, other, short = prompts.text(tokens), prompts.text(tokens), [prompts.text(SHORT) for _ in range(3)]
    ours, theirs = (in_weights(PEERS[name], weights, "best", False) for name in ("sluice", "llama.cpp"))
    for peer in (ours, theirs):
        install(peer, root, folder)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory(dir=disk) as stored:
        runs = (
            ("sluice, store in /dev/shm", _sluice(ours, root, folder, Path(memory), text, short)),
            ("sluice, store on a disk", _sluice(ours, root, folder, Path(stored), text, short)),
            ("llama.cpp", _llama_cpp(theirs, root, folder, Path(stored), [text, other, *short], tokens)),
        )
        for name, rows in runs:
            computed = 0.0
            for where, seconds in rows:
                computed = computed or seconds
                yield [name, where, number(seconds), number(seconds / computed)]


def _sluice(peer: Peer, root: Path, folder: Path, store: Path, text: str, short: list[str]) -> Rows:
    flags = ["--kv-store", str(store), "--kv-store-gb", "4"]
    with _running(peer, root, folder, flags) as target:
        first_token(target, short[0])
        yield "computed", first_token(target, text)
        yield "in memory", first_token(target, text)
    drop_from_page_cache(file for file in store.rglob("*") if file.is_file())
    with _running(peer, root, folder, flags) as target:
        first_token(target, short[1])
        yield "in the store, after a restart", first_token(target, text)


def _llama_cpp(peer: Peer, root: Path, folder: Path, store: Path, texts: list[str], tokens: int) -> Rows:
    text, other, *short = texts
    flags = ["-c", str(tokens + 1024), "-np", "1", "--cache-ram", "8192", "--slot-save-path", f"{store}/"]
    with _running(peer, root, folder, flags) as target:
        first_token(target, short[0])
        yield "computed", first_token(target, text)
        yield "in its slot", first_token(target, text)
        first_token(target, other)
        yield "in --cache-ram, after another prompt", first_token(target, text)
        _slot(target, "save")
    drop_from_page_cache(iter([store / SLOT]))
    with _running(peer, root, folder, flags) as target:
        first_token(target, short[1])
        seconds = _slot(target, "restore")
        yield "in a slot's file, after a restart, restored first", seconds + first_token(target, text)


@contextmanager
def _running(peer: Peer, root: Path, folder: Path, flags: list[str]) -> Iterator[Target]:
    with_flags = replace(peer, serve=lambda *where: [*peer.serve(*where), *flags])
    with launched(with_flags, root, folder) as (target, process):
        wait_until_alive(peer, target, process)
        yield target


def first_token(target: Target, text: str) -> float:
    """Returns the seconds to the first token of a prompt. Raises BenchError if there is none."""
    (record,) = asyncio.run(run(target, [Call(0.0, text, NEW)]))
    if not record.stamps:
        raise BenchError(f"{target.url}: {record.error}")
    return record.ttft


def _slot(target: Target, action: str) -> float:
    """Saves or restores llama.cpp's slot. Returns the seconds that it took. Raises BenchError."""
    url, body = f"{target.url}/slots/0?action={action}", json.dumps({"filename": SLOT}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600.0) as answer:
            return float(json.load(answer)["timings"][f"{action}_ms"]) / 1e3
    except (OSError, KeyError, ValueError) as error:
        raise BenchError(f"{url}: {error}") from error


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

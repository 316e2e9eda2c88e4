"""Loads, replaces and unloads LoRA adapters while streams run, and compares every answer with that of a quiet server.

    python -m bench.adapter_changes [--model qwen3-0.6b] [--streams 32] [--rounds 3]

The streams use the base model and two adapters in turns. They first run --rounds rounds undisturbed, which gives the
expected tokens and pauses. Then they run the same number of rounds while one client changes adapters as fast as it can:
it loads the next of three other adapters under one name and checks a short answer of this adapter. After every third
load it unloads the name. The server has memory for three adapters, so each load first evicts an adapter. The exit code
is 1 if an answer is wrong or a stream is lost.
"""

import argparse
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.checkpoints import checkpoint
from bench.micro.adapters import write_adapter
from bench.packages import httpx
from bench.ranks.faults import DEMO, REQUEST_S, Seen, read, serving

MODELS = ("m", "one", "two")  # the models that streams request: the base model, and two adapters
CHANGING, OTHERS = "changing", ("a", "b", "c")  # the name whose adapter changes; the adapters that get this name
SHORT = 8  # tokens of an answer with a changing adapter
SEED = 5
SIZE = 0.1  # standard deviation of adapter weights: large enough that adapters change the answers


@dataclass(frozen=True)
class Client:
    """Sends requests to the server at `url`. folder: the folder that holds all adapters"""

    url: str
    folder: Path

    def ask(self, model: str, seed: int, tokens: int, seen: Seen) -> list[int]:
        """Returns the token ids of one answer. If the stream is lost, returns only the ids that arrived before."""
        body = {
            "model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 1.0, "seed": seed,
            "ignore_eos": True, "stream_format": "events",
        }  # fmt: skip
        with httpx.stream("POST", self.url + "/v1/completions", json=body, timeout=REQUEST_S) as answer:
            if answer.status_code != 200:
                seen.lost.append(f"{model}: {answer.status_code} {answer.read().decode()}")
                return []
            return read(answer.iter_lines(), seen)

    def stream(self, index: int, tokens: int, rounds: int, seen: Seen) -> list[list[int]]:
        return [self.ask(MODELS[index % len(MODELS)], index, tokens, seen) for _ in range(rounds)]

    def load(self, folder: str) -> None:
        body = {"lora_name": CHANGING, "lora_path": str(self.folder / folder), "load_inplace": True}
        self._post("load", body)

    def unload(self) -> None:
        self._post("unload", {"lora_name": CHANGING})

    def _post(self, verb: str, body: dict[str, object]) -> None:
        httpx.post(f"{self.url}/v1/{verb}_lora_adapter", json=body, timeout=REQUEST_S).raise_for_status()


def change(client: Client, expected: dict[str, list[int]], seen: Seen, stop: threading.Event) -> int:
    """Changes adapters until `stop` is set. Returns the number of changes."""
    changes = 0
    while not stop.is_set():
        folder = OTHERS[changes % len(OTHERS)]
        client.load(folder)
        seen.answers += 1
        seen.wrong += client.ask(CHANGING, SEED, SHORT, seen) != expected[folder]
        changes += 1
        if changes % 3 == 0:
            client.unload()
    return changes


def run(client: Client, streams: int, tokens: int, rounds: int) -> tuple[list[list[list[int]]], Seen]:
    """Returns the answers of each stream, and the pauses and failures that the streams recorded."""
    seen = Seen()
    with ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(lambda index: client.stream(index, tokens, rounds, seen), range(streams)))
    return answers, seen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.adapter_changes", description=__doc__)
    parser.add_argument("--model", default="demo", help="demo, or a shape of bench/checkpoints.py [%(default)s]")
    for name, default in {"streams": 32, "tokens": 64, "rounds": 3, "rank": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    base = DEMO if args.model == "demo" else checkpoint(args.model)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for seed, name in enumerate((*MODELS[1:], *OTHERS)):
            write_adapter(base, folder / name, args.rank, seed, SIZE)
        modules = " ".join(f"{name}={folder / name}" for name in MODELS[1:])
        flags = ["--lora-modules", modules, "--allow-runtime-lora", made, "--max-batch-size", str(args.streams + 1)]
        flags += ["--max-cpu-loras", "3", "--max-loras", "3", "--kv-cache-gb", "1"]
        with serving(str(base), flags) as url:
            return report(Client(url, folder), args.streams, args.tokens, args.rounds)


def report(client: Client, streams: int, tokens: int, rounds: int) -> int:
    short, quiet_short = {}, Seen()
    for other in OTHERS:
        client.load(other)
        short[other] = client.ask(CHANGING, SEED, SHORT, quiet_short)
    client.unload()
    expected, quiet = run(client, streams, tokens, rounds)
    changed, stop = Seen(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change, client, short, changed, stop)
        try:
            answers, busy = run(client, streams, tokens, rounds)
        finally:
            stop.set()
        changes = changing.result()
    different = len({tuple(ids) for ids in (*short.values(), *(one[0] for one in expected))})
    wrong = changed.wrong + sum(one != other for one, other in zip(answers, expected, strict=True))
    lost = [*quiet_short.lost, *quiet.lost, *busy.lost, *changed.lost]
    print(f"{streams} streams, {rounds} answers each of {tokens} tokens; {different} different answers")
    print(f"{changes} adapters loaded, {changes // 3} unloaded, {changed.answers} answers of theirs")
    print(f"lost: {len(lost)} {lost[:1] or ''}; streams or answers with wrong tokens: {wrong}")
    for name, seen in (("without changes", quiet), ("with changes", busy)):
        median = statistics.median(seen.pauses)
        print(f"{name}: longest pause of an answer {median:.3f} s (median), {max(seen.pauses):.3f} s (longest)")
    return 1 if wrong or lost else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares how many texts a second engines embed: `python -m bench.peers.encoders --model FOLDER`.

FOLDER is an encoder in sentence-transformers' layout with mean pooling, such as all-MiniLM-L6-v2. Sluice and llama.cpp
are asked over HTTP (`/v1/embeddings`), ONNX Runtime and OpenVINO in processes of their own, which costs them less
(bench/peers/in_process_encoder.py). Each starts alone. The first request of a case warms up. Texts are random words.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection
from math import nan
from pathlib import Path

from tokenizers import Tokenizer

from bench.checkpoints import cache_folder
from bench.client.server import BenchError
from bench.client.summary import aligned, number
from bench.peers import llama_cpp
from bench.peers.catalog import PEERS, TORCH, TRANSFORMERS, Peer
from bench.peers.engine import output
from bench.peers.in_process_encoder import ENGINES
from bench.peers.llama_cpp import Command
from bench.peers.servers import install, install_once, launched, wait_until_alive
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated

PACKAGES = (
    TORCH, f"transformers=={TRANSFORMERS}", "onnx", "onnxruntime==1.32.0", "openvino==2026.4.1", "sentencepiece",
)  # fmt: skip
LENGTHS, TOGETHER = (16, 128, 256), (1, 32, 256)
TOKENS = 12_000  # of a case, at least two requests
MOST = 100  # requests of a case
TIMEOUT_S = 600.0
Requests = list[list[str]]


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.peers.encoders", description="Compares encoders, in texts per second.")
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="an encoder of sentence-transformers")
    add("--engines", type=comma_separated(COMPARED, every=COMPARED), default="all", metavar="NAME,...",
        help=f"of {', '.join(COMPARED)} [default all]")  # fmt: skip
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which the engines are installed")
    try:
        args = parser.read(words)
        print(compare(args.model.absolute(), args.engines, args.root.absolute()))
    except (ConfigError, BenchError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def compare(folder: Path, engines: Sequence[str], root: Path) -> str:
    """Returns the table in Markdown. Raises BenchError."""
    shapes = [(length, count) for length in LENGTHS for count in TOGETHER]
    words = Words(folder)
    cases = [words.requests(length, count) for length, count in shapes]
    rates = {}
    for name in engines:
        rates[name] = COMPARED[name](root, folder, cases)
        print(f"{name}: {', '.join(map(number, rates[name]))}", file=sys.stderr, flush=True)
    rows = [["texts/s", *engines, "ours to the best other"]]
    for at, (length, count) in enumerate(shapes):
        others = [rate[at] for name, rate in rates.items() if not name.startswith(OURS)]
        ours = [rate[at] for name, rate in rates.items() if name.startswith(OURS)]
        ratio = max(ours, default=nan) / max(others, default=nan)
        figures = [number(rate[at]) for rate in rates.values()]
        rows.append([f"{length} tokens, {count} together", *figures, f"{ratio:.2f}"])
    return aligned(rows)


class Words:
    """Makes random texts with an exact number of tokens."""

    def __init__(self, folder: Path) -> None:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 3)
        self._added = tokenizer.num_special_tokens_to_add(is_pair=False)
        self._random = random.Random(0)

    def requests(self, length: int, count: int) -> Requests:
        """Returns requests of `count` texts of `length` tokens, the first of which warms up."""
        many = 1 + min(MOST, max(2, TOKENS // (length * count)))
        words = length - self._added
        return [[" ".join(self._random.choices(self._words, k=words)) for _ in range(count)] for _ in range(many)]


def _served(peer: Peer, root: Path, folder: Path, cases: list[Requests]) -> list[float]:
    install(peer, root, folder)
    with launched(peer, root, folder) as (target, process):
        wait_until_alive(peer, target, process)
        with closing(HTTPConnection(target.url.removeprefix("http://"), timeout=TIMEOUT_S)) as connection:
            return [_rate(connection, requests) for requests in cases]


def _rate(connection: HTTPConnection, requests: Requests) -> float:
    """Looks at the answers after the clock has stopped, because the client uses the same cores."""
    bodies = [json.dumps({"model": "m", "input": texts}) for texts in requests]
    answers = [_post(connection, bodies[0])]
    begun = time.perf_counter()
    answers += [_post(connection, body) for body in bodies[1:]]
    took = time.perf_counter() - begun
    for texts, (status, answer) in zip(requests, answers, strict=True):
        if status != 200 or len(json.loads(answer)["data"]) != len(texts):
            raise BenchError(f"{connection.host}:{connection.port}: {status} {answer[:200]!r}")
    return sum(map(len, requests[1:])) / took


def _post(connection: HTTPConnection, body: str) -> tuple[int, bytes]:
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read()


def _ours(dtype: str) -> Peer:
    def serve(root: Path, folder: Path, port: int) -> Command:
        flags = ["--model", str(folder), "--served-model-name", "m", "--port", str(port), "--dtype", dtype]
        return [sys.executable, "-m", "deploy.cli.main", "serve", *flags, "--worker-metrics-port", "0"]

    return replace(PEERS["sluice"], serve=serve)


def _converted(root: Path, folder: Path) -> list[Command]:
    to = _gguf(folder)
    script = root / "sdist" / llama_cpp.SOURCE / "vendor/llama.cpp/convert_hf_to_gguf.py"
    python = str(root / "encoders/bin/python")
    return [] if to.exists() else [[python, str(script), str(folder), "--outtype", "f32", "--outfile", str(to)]]


def _gguf(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-f32.gguf")


def _llama_cpp(root: Path, folder: Path, port: int) -> Command:
    return [
        str(llama_cpp.programs(root) / "llama-server"), "-m", str(_gguf(folder)), "--embedding", "-t",
        llama_cpp.threads(), "-b", "8192", "-ub", "8192", "-c", "8192", "-np", "32",
        "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


def _in_process(name: str, root: Path, folder: Path, cases: list[Requests]) -> list[float]:
    _install(root)
    file = root / "texts.json"
    file.write_text(json.dumps(cases))
    script = str(Path(__file__).with_name("in_process_encoder.py"))
    command = [str(root / "encoders/bin/python"), script, name, str(folder), str(file)]
    return [json.loads(line) for line in output(command).splitlines()]


def _install(root: Path) -> None:
    pip = [str(root / "encoders/bin/pip"), "install", "-q"]
    install_once("encoders", [[sys.executable, "-m", "venv", str(root / "encoders")], [*pip, *PACKAGES]], root)


def _theirs(root: Path, folder: Path, cases: list[Requests]) -> list[float]:
    _install(root)  # its converter needs transformers
    return _served(replace(PEERS["llama.cpp"], serve=_llama_cpp, prepare=_converted), root, folder, cases)


OURS = "sluice"
COMPARED: dict[str, Callable[[Path, Path, list[Requests]], list[float]]] = {
    OURS: partial(_served, _ours("float32")),
    f"{OURS} bfloat16": partial(_served, _ours("bfloat16")),
    "llama.cpp": _theirs,
    **{name: partial(_in_process, name) for name in ENGINES},
}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

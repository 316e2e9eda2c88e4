"""Compares the engines of Sluice, llama.cpp and others without HTTP: `python -m bench.peers.engine --help`.

All run the same weights in turns, Sluice and llama.cpp on the same instruction set. A row of the table takes half a
minute, so use this for tuning kernels; `python -m bench.peers` compares what clients see.
"""

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan, nan
from pathlib import Path
from typing import Any

from bench.checkpoints import ALL_SHAPES, cache_folder, chosen, gguf_model
from bench.client.server import BenchError
from bench.client.summary import NOTHING, aligned, number, to_json
from bench.micro.engine import DECODE_STEPS, PROMPT
from bench.peers import llama_cpp
from bench.peers.catalog import ENGINES, PEERS, engine_rates, in_weights, setup_engine, sluice_flags
from bench.peers.llama_cpp import ANY_WEIGHTS, ISAS, WEIGHTS
from bench.peers.servers import install, install_once
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, new_file, positive_int

OURS = "sluice"
LONG = 1024
TEXT = 100_000  # characters, of which the other engines' prompts are made
DECODES = (1, 8, 32)
COUNTS = {"prefill": f"prefill {LONG}", **{f"decode{count}": f"decode {count}" for count in DECODES}}
FLAGS = ("--kv-cache-gb", "1", "--max-batch-size", "32", "--max-seq-len", "2048", "--speculation", "off")

Rates = dict[str, float]  # measurement (a key of COUNTS) → tokens per second


def main(words: list[str]) -> int:
    try:
        args = _parser().read(words)
        root, found = args.root.absolute(), chosen(args, args.models.absolute())
        cases = [Case(root, folder, weights, isa, args.safetensors) for folder, weights in found for isa in args.isa]
        engines = [args.only] if args.only else [OURS, "llama.cpp", *args.others]
        results = [compare(case, args.scenarios, args.rounds, engines) for case in cases]
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.peers.engine: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(table(engines, [row for rows in results for row in rows]))
    if args.json:
        args.json.write_text(to_json(results))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.peers.engine", description="Compares engines without HTTP.")
    add = parser.add_argument
    add("--shape", type=comma_separated(ALL_SHAPES), default="qwen3-0.6b", metavar="NAME,...",
        help=f"of {', '.join(ALL_SHAPES)}")  # fmt: skip
    add("--weights", type=comma_separated(ANY_WEIGHTS, every=WEIGHTS), default="all", metavar="NAME,...",
        help=f"of {', '.join(ANY_WEIGHTS)} [default all, which are those of any shape]")  # fmt: skip
    add("--isa", type=comma_separated(ISAS), default="best", metavar="NAME,...",
        help=f"of {', '.join(ISAS)} [default %(default)s]")  # fmt: skip
    add("--scenarios", type=comma_separated(COUNTS, every=COUNTS), default="all", metavar="NAME,...",
        help=f"of {', '.join(COUNTS)} [default all]")  # fmt: skip
    add("--rounds", type=positive_int, default=2, metavar="N", help="the best of N counts [default %(default)s]")
    add("--safetensors", action="store_true",
        help="Sluice reads the bfloat16 checkpoint, with --quantization for few bits, not the GGUF file")  # fmt: skip
    add("--file", type=gguf_model, action="append", default=[], metavar="FILE",
        help="instead of --shape and --weights: this GGUF file; may be repeated")  # fmt: skip
    add("--only", choices=(OURS, "llama.cpp", *ENGINES), help="measure one engine")
    add("--others", type=comma_separated(ENGINES, every=ENGINES), default=(), metavar="NAME,...",
        help=f"measure these, too: {', '.join(ENGINES)}; prefill and decode at 1, on this processor's best "
        "instruction set")  # fmt: skip
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which llama.cpp is built")
    add("--models", type=Path, default=cache_folder(), help="folder of the checkpoints")
    add("--json", type=new_file, metavar="FILE", help="write all figures here")
    return parser


@dataclass(frozen=True, slots=True)
class Case:
    """The settings that a row of the table compares."""

    root: Path
    folder: Path
    weights: str
    isa: str
    safetensors: bool

    @property
    def name(self) -> str:
        return f"{self.folder.name}, {self.weights}, {self.isa}"


def compare(case: Case, scenarios: list[str], rounds: int, engines: list[str]) -> list[list[Any]]:
    """Returns a row for each scenario: case, scenario, and the tokens/s of each of `engines`."""
    if "llama.cpp" in engines or not case.safetensors:
        _prepare(case)
    others = [name for name in engines if name in ENGINES]
    for name in others:
        install_once(name, setup_engine(case.root, name), case.root)
    best: dict[str, Rates] = {name: {} for name in engines}
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(_sluice(case)) if OURS in engines else None
        for _ in range(rounds):
            if engine is not None:
                _keep_best(best[OURS], {name: _ask(engine, COUNTS[name]) for name in scenarios})
            if "llama.cpp" in engines:
                _keep_best(best["llama.cpp"], _llama_cpp(case, scenarios))
            for name in others:
                _keep_best(best[name], _other(case, name))
            print(f"{case.name}: {'; '.join(f'{name} {_text(best[name])}' for name in engines)}", file=sys.stderr)
    return [[case.name, name, *(best[engine].get(name, nan) for engine in engines)] for name in scenarios]


def table(engines: list[str], rows: list[list[Any]]) -> str:
    """Returns the rows of `compare` in Markdown, with the ratio of Sluice's figure to the best other one."""
    cells = [[case, name, *map(number, rates), _ratio(engines, rates)] for case, name, *rates in rows]
    return aligned([["tokens/s", "", *engines, "ours to the best other"], *cells])


def _ratio(engines: list[str], rates: list[float]) -> str:
    measured = {name: rate for name, rate in zip(engines, rates, strict=True) if not isnan(rate)}
    ours = measured.pop(OURS, nan)
    return NOTHING if isnan(ours) or not measured else f"{ours / max(measured.values()):.2f}"


def _prepare(case: Case) -> None:
    """Builds llama.cpp and makes the GGUF file of this case, which a large shape gets without a file in bfloat16."""
    install(in_weights(PEERS["llama.cpp"], case.weights, case.isa, case.safetensors), case.root, case.folder)


@contextlib.contextmanager
def _sluice(case: Case) -> Iterator["subprocess.Popen[str]"]:
    command = [
        sys.executable,
        "-m",
        "bench.micro.engine",
        *sluice_flags(case.folder, case.weights, case.safetensors),
        *FLAGS,
    ]
    isa = {"SLUICE_ISA": ISAS[case.isa].sluice}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | isa
    ) as process:
        try:
            print(f"{case.name}: {_answer(process)}", file=sys.stderr, flush=True)
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _ask(process: "subprocess.Popen[str]", question: str) -> float:
    assert process.stdin is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    return float(_answer(process)["tokens_s"])


def _answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError("Sluice's engine ended; its output above says why")
    answer: dict[str, Any] = json.loads(line)
    return answer


def _llama_cpp(case: Case, scenarios: list[str]) -> Rates:
    rates: Rates = {}
    where = (case.root, case.folder, case.weights, case.isa)
    if "prefill" in scenarios:
        rates["prefill"] = _lines(llama_cpp.bench_prefill(*where, LONG))[0]["avg_ts"]
    counts = [count for count in DECODES if f"decode{count}" in scenarios]
    if counts:
        for line in _lines(llama_cpp.bench_decode(*where, PROMPT, DECODE_STEPS, counts)):
            rates[f"decode{line['pl']}"] = line["speed_tg"]
    return rates


def _other(case: Case, name: str) -> Rates:
    """Returns no rates, and says why, where the engine cannot read the file or crashes."""
    text = case.root / "text.txt"
    if not text.exists():
        library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text.write_text("".join(file.read_text("utf-8", "ignore") for file in library)[:TEXT])
    file = llama_cpp.gguf(case.folder, case.weights)
    try:
        short, long = _lines(engine_rates(case.root, name, file, text, [PROMPT, LONG], DECODE_STEPS))
    except BenchError as error:
        print(error, file=sys.stderr)
        return {}
    return {"prefill": long["prefill"], "decode1": short["decode"]}


def _lines(command: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output(command).splitlines() if line.startswith("{")]


def output(command: list[str]) -> str:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "")).strip().splitlines()[-1:] or [str(error)]
        raise BenchError(f"{' '.join(command)[:150]} failed: {reason[0]}") from error


def _keep_best(best: Rates, rates: Rates) -> None:
    for name, rate in rates.items():
        best[name] = max(rate, best.get(name, 0.0))


def _text(rates: Rates) -> str:
    return ", ".join(f"{name} {number(rate)}" for name, rate in rates.items()) or "not measured"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

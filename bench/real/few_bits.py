"""Perplexities of a real model in GGUF's formats of few bits, beside llama.cpp's: `python -m bench.real.few_bits`.

llama.cpp makes every file: `llama-quantize`, with the importance matrix that `llama-imatrix` makes of the beginning of
the text, because the smallest formats need one. Rows whose length is no multiple of a format's block (256 numbers in
most of them) get another format, as in every file of such a model; the table says how much of the weights has which.
`llama-perplexity` predicts the first windows of the text and saves its log-probabilities with the ids of the tokens.
Sluice predicts the same ids from the same file. Each file is deleted after its rows, unless --keep is given.
"""

import argparse
import gc
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import gguf  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

from bench.checkpoints import cache_folder  # noqa: E402
from bench.client.server import BenchError  # noqa: E402
from bench.client.summary import to_json  # noqa: E402
from bench.peers import llama_cpp  # noqa: E402
from bench.real.base_file import BaseFile  # noqa: E402
from bench.real.formats import output  # noqa: E402
from bench.real.predict import compare, loaded  # noqa: E402
from bench.real.text import packaged_text, paragraphs  # noqa: E402
from shared.config.check import check  # noqa: E402
from shared.config.declaration import ConfigError  # noqa: E402
from shared.config.flags import Parser, comma_separated, new_file, positive_int  # noqa: E402
from shared.config.settings import Settings, with_values  # noqa: E402
from shared.gguf.translated import translated  # noqa: E402
from worker.ops import native as c_library  # noqa: E402

CALIBRATED = 4  # windows of the text that the importance matrix is made of
WHOLE = (  # formats of whole files
    "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_s", "iq3_m", "iq4_xs", "iq4_nl", "q2_k",
    "q3_k_m", "q4_0", "q4_k_m", "q6_k", "q8_0",
)  # fmt: skip
SIX_LAYERS = (r"blk\.1[2-7]\.ffn_down",)
IN_Q8_0 = {  # format → regular expressions of the tensors that have it; the others get Q8_0
    "mxfp4": ("attn", "ffn"),  # llama-quantize has these two as types of tensors only
    "nvfp4": ("attn", "ffn"),
    "tq1_0": SIX_LAYERS,  # a model that was not trained for three values predicts nothing if all layers have them
    "tq2_0": SIX_LAYERS,
}
EACH = (  # types of the down projections of layers 4 to 18 of the format `each`, which is Q4_K_M otherwise
    "iq4_xs", "iq4_nl", "iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m", "iq1_s", "tq1_0", "tq2_0", "mxfp4",
    "nvfp4", "q2_k", "q3_k",
)  # fmt: skip
FORMATS = (*WHOLE, *IN_Q8_0, "each")
ENGINES: dict[str, dict[str, str]] = {  # name → settings of the worker
    "default": {},
    "float": {"activations": "float"},
    "float32": {"activations": "float", "dtype": "float32"},
}
HEAD = (
    "| format | weights | activations | llama.cpp | Sluice | to llama.cpp | KL, nats per token | same top-1 |\n"
    "|---|---|---|--:|--:|--:|--:|--:|"
)
FINAL = r"Final estimate: PPL = ([\d.]+)"  # llama-perplexity's last line


@dataclass(frozen=True, slots=True)
class Row:
    """How Sluice, with one of ENGINES, predicts a file, beside llama.cpp."""

    format: str
    weights: str  # the shares of the types of the file's matrices
    engine: str
    kernels: str
    predicted: int  # tokens
    theirs: float  # llama.cpp's perplexity
    perplexity: float
    error: float  # standard error of ln(perplexity / theirs)
    kl: float  # KL(llama.cpp || Sluice)
    agreement: float  # share of tokens with the same most likely token, from 0 to 1

    @property
    def line(self) -> str:
        ratio = f"{self.perplexity / self.theirs - 1:+.2%} ± {self.error:.2%}"
        return (
            f"| {self.format} | {self.weights} | {self.engine} | {self.theirs:.4f} | {self.perplexity:.4f} | {ratio} "
            f"| {self.kl:.2e} | {self.agreement:.2%} |"
        )


def main(words: list[str]) -> int:
    try:
        args = _parser().read(words)
        rows = []
        for row in _rows(args):
            print(row.line, file=sys.stderr, flush=True)
            rows.append(row)
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.real.few_bits: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print("\n".join([HEAD, *(row.line for row in rows)]))
    if args.json:
        args.json.write_text(to_json([asdict(row) for row in rows]))
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.real.few_bits", description="Measures GGUF's formats beside llama.cpp.")
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="GGUF", help="the file that all others are made of")
    add("--text", type=Path, metavar="FILE", help="English text [default: two books from the source of a package]")
    add("--formats", type=comma_separated(FORMATS, every=FORMATS), default="all", metavar="NAME,...",
        help=f"of {', '.join(FORMATS)} [default all]")  # fmt: skip
    add("--engines", type=comma_separated(ENGINES), default="default,float", metavar="NAME,...",
        help=f"Sluice's activations, of {', '.join(ENGINES)} [default %(default)s]")  # fmt: skip
    add("--window", type=positive_int, default=512, metavar="TOKENS", help="length of a window [default %(default)s]")
    add("--windows", type=positive_int, default=8, metavar="N", help="how many there are [default %(default)s]")
    add("--root", type=Path, default=cache_folder() / "real", help="folder of the files that are made")
    add("--peers", type=Path, default=cache_folder() / "peers", help="folder in which llama.cpp is built")
    add("--keep", action="store_true", help="keep the files")
    add("--json", type=new_file, metavar="FILE", help="write all figures here")
    return parser


def _rows(args: argparse.Namespace) -> Iterator[Row]:
    args.root.mkdir(parents=True, exist_ok=True)
    text = args.root / "few-bits.txt"
    text.write_text(paragraphs(args.text.read_text()) if args.text else packaged_text(args.root))
    matrix = args.root / f"{args.model.stem}.imatrix.gguf"
    if not matrix.exists():
        output(llama_cpp.importance(args.peers, args.model, text, matrix, args.window, CALIBRATED))
    for name in args.formats:
        file, base = (args.root / f"{args.model.stem}-{name}.{end}" for end in ("gguf", "base"))
        if not file.exists():
            output(llama_cpp.quantize(args.peers, args.model, file, matrix, *_type(name)))
        printed = output(llama_cpp.save(args.peers, file, text, base, args.window, args.windows))
        found = re.search(FINAL, printed)
        if found is None:
            raise BenchError(f"llama-perplexity printed nothing like {FINAL}: {printed[-500:]}")
        for engine in args.engines:
            yield _row(name, file, BaseFile.open(base), engine, float(found[1]))
            gc.collect()  # the next engine may need the memory
        base.unlink()
        if not args.keep:
            file.unlink()


def _type(name: str) -> tuple[str, ...]:
    """Returns llama-quantize's name of a format, and the flags that it needs."""
    if name == "each":
        return "Q4_K_M", *_types({rf"blk\.{layer}\.ffn_down": type for layer, type in enumerate(EACH, 4)})
    if name in IN_Q8_0:
        return "Q8_0", *_types(dict.fromkeys(IN_Q8_0[name], name))
    return (name.upper(),)


def _types(tensors: Mapping[str, str]) -> list[str]:
    """tensors: regular expression of names → type."""
    return [word for tensor, type in tensors.items() for word in ("--tensor-type", f"{tensor}={type}")]


@torch.inference_mode()
def _row(name: str, file: Path, base: BaseFile, engine: str, theirs: float) -> Row:
    tokenizer = Tokenizer.from_file(str(translated([file]) / "tokenizer.json"))
    for bos in tokenizer.encode("").ids:  # llama-perplexity begins each window with it, but does not write it
        for window in base.windows:
            window[0] = bos
    values = {"model": str(file), "kv_cache_gb": 0.5, **ENGINES[engine]}
    found = compare(base, len(base.windows), loaded(check(with_values(Settings(), values), values.keys())))
    return Row(
        name, weights(file), engine, c_library.tier(), int(found["predicted"]), theirs, found["perplexity"],
        found["error"], found["kl"], found["agreement"],
    )  # fmt: skip


def weights(file: Path) -> str:
    """Returns the shares of the types of a file's matrices, the largest first."""
    counts: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(file).tensors:
        if len(tensor.shape) > 1:
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
    return ", ".join(f"{type} {count / counts.total():.0%}" for type, count in counts.most_common())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

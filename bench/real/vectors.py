"""Compares vectors with those of sentence-transformers: `python -m bench.real.vectors --model FOLDER`.

FOLDER is an encoder in sentence-transformers' layout. Both compute the sentences of English text in float32: Sluice
over HTTP, in requests of mixed sizes, sentence-transformers in this process, which needs the package of that name.
Prints how far the numbers of vectors, and the cosines of pairs of sentences, are apart, and whether the server gives a
sentence the same bits alone and in a large request.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.checkpoints import cache_folder
from bench.client.server import BenchError, served
from bench.real.text import packaged_text, paragraphs
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, positive_int

Vectors = NDArray[np.float32]  # [texts, D]
SIZES = (1, 2, 7, 31, 64, 256)  # texts of a request
COMPANY = 300  # texts in the request whose bits are compared with those of each text alone
ALONE = 24  # texts that are computed alone
SHORTEST = 12  # characters of a sentence
TIMEOUT_S = 600.0
HEAD = (
    "| sentences | longest, tokens | numbers: largest Δ | pairs | cosines: largest Δ | mean Δ | bits alone |\n"
    "|--:|--:|--:|--:|--:|--:|--:|"
)


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.real.vectors", description="Compares vectors with sentence-transformers.")
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FOLDER", help="an encoder of sentence-transformers")
    add("--text", type=Path, metavar="FILE", help="English text [default: two books from the source of a package]")
    add("--pairs", type=positive_int, default=1000, metavar="N", help="pairs of sentences [default %(default)s]")
    add("--root", type=Path, default=cache_folder() / "real", help="folder of the text that is fetched")
    try:
        print(f"{HEAD}\n{compared(parser.read(words))}")
    except (ConfigError, BenchError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def compared(args: argparse.Namespace) -> str:
    """Returns the row of the table. Raises BenchError."""
    reference, longest = _reference(args.model)
    args.root.mkdir(parents=True, exist_ok=True)
    text = paragraphs(args.text.read_text()) if args.text else packaged_text(args.root)
    sentences = sentences_of(text, 2 * args.pairs)
    theirs = reference(sentences)
    with (
        served(str(args.model), ("--dtype", "float32")) as target,
        closing(HTTPConnection(target.url.removeprefix("http://"), timeout=TIMEOUT_S)) as connection,
    ):
        ours = np.concatenate([_asked(connection, part) for part in _parts(sentences)])
        together = _asked(connection, sentences[:COMPANY])
        alone = [_asked(connection, [one]) for one in sentences[:ALONE]]
    same = sum(one.tobytes() == row.tobytes() for one, row in zip(alone, together, strict=False))
    pairs = abs(_cosines(ours) - _cosines(theirs))
    return (
        f"| {len(sentences):,} | {longest(sentences)} | {abs(ours - theirs).max():.1e} | {len(pairs):,} "
        f"| {pairs.max():.1e} | {pairs.mean():.1e} | {same} of {len(alone)} |"
    )


def sentences_of(text: str, count: int) -> list[str]:
    """Returns sentences from the whole text, in another order. Raises BenchError if there are too few."""
    found = [one for one in re.split(r"(?<=[.!?])\s+|\n+", text) if len(one) >= SHORTEST]
    if len(found) < count:
        raise BenchError(f"the text has {len(found)} sentences; --pairs asks for {count}")
    return random.Random(0).sample(found, count)


def _reference(folder: Path) -> tuple[Any, Any]:
    """Returns two functions of a list of texts: their vectors [texts, D], and the tokens of the longest."""
    try:
        from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]
    except ImportError as error:
        raise BenchError(f"this needs sentence-transformers: {sys.executable} -m pip install it") from error
    model = SentenceTransformer(str(folder), device="cpu")
    return lambda texts: model.encode(texts), lambda texts: max(len(ids) for ids in model.tokenizer(texts)["input_ids"])


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    at, turn = 0, 0
    while at < len(texts):
        size = SIZES[turn % len(SIZES)]
        yield texts[at : at + size]
        at, turn = at + size, turn + 1


def _asked(connection: HTTPConnection, texts: Sequence[str]) -> Vectors:
    body = json.dumps({"model": "m", "input": [*texts], "truncate_prompt_tokens": -1})  # as the reference cuts
    connection.request("POST", "/v1/embeddings", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = json.loads(response.read())
    if response.status != 200:
        raise BenchError(f"/v1/embeddings answered {response.status}: {answer}")
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


def _cosines(vectors: Vectors) -> NDArray[np.float64]:
    """Returns the cosine of each two neighbours."""
    a, b = vectors[::2].astype(np.float64), vectors[1::2].astype(np.float64)
    cosines: NDArray[np.float64] = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    return cosines


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Compares Sluice with other servers on the same machine and weights, in turns. `python -m bench.peers --help`.

The first run installs each server into its own environment (gigabytes, and minutes of compiling llama.cpp).
"""

import sys
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from bench.checkpoints import ALL_SHAPES, cache_folder, checkpoint, chosen, gguf_model
from bench.client.server import BenchError
from bench.client.summary import aligned, number, to_json
from bench.peers.catalog import PEERS, Peer, configured, in_weights, with_context
from bench.peers.llama_cpp import ANY_WEIGHTS, ISAS, WEIGHTS
from bench.peers.scenarios import PROMPT, Figures, Prompts, Scenario, at_depth, pooled, scenarios
from bench.peers.servers import PeerServer, install, started_peers
from bench.peers.serving import compare_serving
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, new_file, positive_int

OURS = "sluice"
SERVED_TOKENS = 200  # number of tokens per stream
SCENARIOS = {scenario.name: scenario for scenario in scenarios()}

AllFigures = dict[str, list[Figures]]  # peer → its figures in each round
Case = tuple[Path, str, str]  # a checkpoint's folder, weights and instruction set


def main(words: list[str]) -> int:
    try:
        args = _parser().read(words)
        peers = [*(PEERS[name] for name in args.peers), *args.also]
        if args.serving:
            print(serving(peers, args.serving, args.root))
            return 0
        selected = [at_depth(depth) for depth in args.depth] or [SCENARIOS[name] for name in args.scenarios]
        found = chosen(args, args.models.absolute())
        cases = [(folder, weights, isa) for folder, weights in found for isa in args.isa]
        figures = {title(case): compare(case, peers, selected, args) for case in cases}
        if args.json:
            args.json.write_text(to_json(figures))
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.peers: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.peers", description="Compares Sluice with other servers on the same weights.")
    add = parser.add_argument
    add("--shape", type=comma_separated(ALL_SHAPES), default="qwen3-0.6b", metavar="NAME,...",
        help=f"shapes of random checkpoints, or a real model: {', '.join(ALL_SHAPES)} [%(default)s]")  # fmt: skip
    add("--file", type=gguf_model, action="append", default=[], metavar="FILE",
        help="instead of --shape and --weights: this GGUF file; may be repeated")  # fmt: skip
    add("--weights", type=comma_separated(ANY_WEIGHTS, every=WEIGHTS), default="bf16", metavar="NAME,...",
        help=f"formats of the weights, of {', '.join(ANY_WEIGHTS)}; in few bits for Sluice and llama.cpp only "
        "[default %(default)s]")  # fmt: skip
    add("--isa", type=comma_separated(ISAS), default="best", metavar="NAME,...",
        help=f"instruction sets of Sluice and llama.cpp, of {', '.join(ISAS)} [default %(default)s]")  # fmt: skip
    add("--safetensors", action="store_true",
        help="Sluice reads the bfloat16 checkpoint, with --quantization for few bits, not the GGUF file")  # fmt: skip
    add("--peers", type=comma_separated(PEERS, every=PEERS), default="all", metavar="NAME,...",
        help=f"servers to compare, of {', '.join(PEERS)} [default %(default)s]")  # fmt: skip
    add("--also", type=configured, action="append", default=[], metavar='"--flag value ..."',
        help="compare another Sluice with these flags; may be repeated, as --also='...'")  # fmt: skip
    add("--scenarios", type=comma_separated(SCENARIOS, every=SCENARIOS), default="all", metavar="NAME,...",
        help=f"scenarios to run, of {', '.join(SCENARIOS)} [default %(default)s]")  # fmt: skip
    add("--depth", type=_depths, default="", metavar="N,...",
        help="instead of --scenarios: decoding at these depths of context, such as 0,4k,16k,32k")  # fmt: skip
    add("--rounds", type=positive_int, default=3, metavar="N",
        help="how often each server runs each scenario [default %(default)s]")  # fmt: skip
    add("--fields", type=_fields, default={}, metavar="JSON",
        help='of every request, such as {"temperature": 0.8, "top_p": 0.95}; temperature is 0 otherwise')  # fmt: skip
    add("--quick", action="store_true", help="warm up with the first scenario only, and count one round")
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which the servers are installed")
    add("--models", type=Path, default=cache_folder(), help="folder of the checkpoints")
    add("--json", type=new_file, metavar="FILE", help="write all figures of all rounds")
    add("--serving", type=_counts, metavar="N,...",
        help="instead: CPU time per token around a tiny model, with so many concurrent streams")  # fmt: skip
    return parser


def _counts(text: str) -> list[int]:
    return [positive_int(word) for word in text.split(",")]


def _depths(text: str) -> list[int]:
    """Reads numbers of tokens; k stands for 1,024. Raises ArgumentTypeError."""
    depths = []
    for word in text.split(",") if text else ():
        number, factor = (word[:-1], 1024) if word[-1:] in ("k", "K") else (word, 1)
        if not number.isdecimal():
            raise ArgumentTypeError(f"{word!r} is not a number of tokens, such as 4096 or 4k")
        depths.append(int(number) * factor)
    return depths


def _fields(text: str) -> dict[str, Any]:
    """Reads an object. Raises ArgumentTypeError."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ArgumentTypeError(f"{text!r} is no JSON object: {error}") from None


def serving(peers: list[Peer], streams: list[int], root: Path) -> str:
    """Measures each peer's CPU time per streamed token and returns a Markdown table. Raises BenchError."""
    folder = checkpoint("tiny")
    for peer in peers:
        install(peer, root.absolute(), folder)
    return compare_serving(peers, root, folder, streams, SERVED_TOKENS)


def title(case: Case) -> str:
    folder, weights, isa = case
    return f"{folder.name}, {weights}, {isa}"


def compare(case: Case, peers: list[Peer], selected: list[Scenario], args: Namespace) -> AllFigures:
    """Runs the scenarios on each peer, prints a table in Markdown, and returns the figures of all rounds by peer.

    Raises BenchError.
    """
    folder, weights, isa = case
    root = args.root.absolute()
    peers = [in_weights(peer, weights, isa, args.safetensors) for peer in peers]
    if args.depth:
        peers = [with_context(peer, max(args.depth) + PROMPT) for peer in peers]
    for peer in peers:
        install(peer, root, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with started_peers(peers, root, folder) as servers:
        warm_up = selected[: 1 if args.quick else None]
        rounds = [warm_up, *[selected] * (1 if args.quick else args.rounds)]
        measured = _run_rounds(servers, rounds, tokenizer, args.fields)
    figures = {server.peer.name: results for server, results in measured}
    print(_table(title(case), {name: pooled(all_rounds) for name, all_rounds in figures.items()}), flush=True)
    return figures


def _run_rounds(
    servers: list[PeerServer], rounds: list[list[Scenario]], tokenizer: Tokenizer, fields: dict[str, Any]
) -> list[tuple[PeerServer, list[Figures]]]:
    results: list[tuple[PeerServer, list[Figures]]] = [(server, []) for server in servers]
    for at, selected in enumerate(rounds):  # the first round warms up and is not counted
        for scenario in selected:
            for server, figures in results:
                with server.resumed() as target:
                    measured = scenario.run(replace(target, extra=fields), Prompts(tokenizer, f"{scenario.name} {at}"))
                print(
                    f"round {at}, {scenario.name}, {server.peer.name}: {_text(measured)}", file=sys.stderr, flush=True
                )
                if at:
                    figures.append(measured)
    return results


def _text(figures: Figures) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in figures.items())


def _table(title: str, columns: dict[str, Figures]) -> str:
    figures = list(dict.fromkeys(name for column in columns.values() for name in column))
    peers = [name for name in columns if name != OURS]
    rows = [[title, *columns, "ours to the best peer"]]
    for name in figures:
        values = {peer: column.get(name, float("nan")) for peer, column in columns.items()}
        rows.append([name, *(number(value) for value in values.values()), _ratio(name, values, peers)])
    return aligned(rows)


def _ratio(name: str, values: dict[str, float], peers: list[str]) -> str:
    """Returns Sluice's ratio to the best peer. Above 1, Sluice is better: more tokens or fewer milliseconds."""
    theirs = [values[peer] for peer in peers if values[peer] == values[peer]]
    ours = values.get(OURS, float("nan"))
    if not theirs or ours != ours or name.endswith("failed"):
        return number(float("nan"))
    return f"{ours / max(theirs):.2f}" if name.endswith("tokens/s") else f"{min(theirs) / ours:.2f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

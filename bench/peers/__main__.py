"""Compares Sluice with other servers: same machine, same minutes, same weights. `python -m bench.peers --help`.

The first run installs each server into its own environment (gigabytes, and minutes of compiling llama.cpp).
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer

from bench.checkpoints import SHAPES, cache_folder, checkpoint
from bench.client.server import BenchError
from bench.client.summary import aligned, number, to_json
from bench.peers.catalog import PEERS, Peer, configured
from bench.peers.scenarios import Figures, Prompts, Scenario, pooled, scenarios
from bench.peers.servers import PeerServer, install, started_peers
from bench.peers.serving import compare_serving
from shared.arguments import comma_separated, new_file, positive_int
from shared.config import ConfigError
from shared.flags import Parser

OURS = "sluice"
SERVED_TOKENS = 200  # number of tokens of a stream


def main(words: list[str]) -> int:
    parser = Parser(prog="python -m bench.peers", description="Compares Sluice with other servers on the same weights.")
    add = parser.add_argument
    add(
        "--shape",
        default="qwen3-0.6b",
        choices=sorted(SHAPES),
        help="shape of the random checkpoint [default %(default)s]",
    )
    add(
        "--peers", type=comma_separated(PEERS, every=PEERS), default="all", metavar="NAME,...",
        help=f"servers to compare, of {', '.join(PEERS)} [default %(default)s]",
    )  # fmt: skip
    add(
        "--also", type=configured, action="append", default=[], metavar='"--flag value ..."',
        help="compare another Sluice with these flags; may be repeated, as --also='...'",
    )  # fmt: skip
    all_scenarios = {scenario.name: scenario for scenario in scenarios()}
    add(
        "--trials", type=comma_separated(all_scenarios, every=all_scenarios), default="all", metavar="NAME,...",
        help=f"scenarios to run, of {', '.join(all_scenarios)} [default %(default)s]",
    )  # fmt: skip
    add(
        "--rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help="how often each server runs each scenario [default %(default)s]",
    )
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which the servers are installed")
    add("--json", type=new_file, metavar="FILE", help="write all figures of all rounds")
    add(
        "--serving", type=_counts, metavar="N,...",
        help="instead: CPU time per token around a model of one tiny layer, with so many concurrent streams",
    )  # fmt: skip
    try:
        args = parser.read(words)
        peers = [*(PEERS[name] for name in args.peers), *args.also]
        if args.serving:
            print(serving(peers, args.serving, args.root))
        else:
            selected = [all_scenarios[name] for name in args.trials]
            print(compare(args.shape, peers, selected, args.rounds, args.root, args.json))
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.peers: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _counts(text: str) -> list[int]:
    return [positive_int(word) for word in text.split(",")]


def serving(peers: list[Peer], streams: list[int], root: Path) -> str:
    """Measures what serving costs each peer and returns the table in Markdown. Raises BenchError."""
    folder = checkpoint("tiny")
    for peer in peers:
        install(peer, root.absolute(), folder)
    return compare_serving(peers, root, folder, streams, SERVED_TOKENS)


def compare(shape: str, peers: list[Peer], selected: list[Scenario], rounds: int, root: Path, out: Path | None) -> str:
    """Runs the scenarios on each peer and returns the table in Markdown; writes every round to `out` as JSON. Raises
    BenchError."""
    folder = checkpoint(shape)
    for peer in peers:
        install(peer, root.absolute(), folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with started_peers(peers, root.absolute(), folder) as servers:
        figures = {server.peer.name: results for server, results in _run_rounds(servers, selected, rounds, tokenizer)}
    if out is not None:
        out.write_text(to_json(figures))
    return _table(shape, {name: pooled(all_rounds) for name, all_rounds in figures.items()})


def _run_rounds(
    servers: list[PeerServer], selected: list[Scenario], rounds: int, tokenizer: Tokenizer
) -> list[tuple[PeerServer, list[Figures]]]:
    results: list[tuple[PeerServer, list[Figures]]] = [(server, []) for server in servers]
    for at in range(rounds + 1):  # the first round warms up and is not counted
        for scenario in selected:
            for server, figures in results:
                with server.resumed() as target:
                    measured = scenario.run(target, Prompts(tokenizer, f"{scenario.name} {at}"))
                print(
                    f"round {at}, {scenario.name}, {server.peer.name}: {_text(measured)}", file=sys.stderr, flush=True
                )
                if at:
                    figures.append(measured)
    return results


def _text(figures: Figures) -> str:
    return ", ".join(f"{name} {number(value)}" for name, value in figures.items())


def _table(shape: str, columns: dict[str, Figures]) -> str:
    figures = list(dict.fromkeys(name for column in columns.values() for name in column))
    peers = [name for name in columns if name != OURS]
    rows = [[f"{shape}, bfloat16", *columns, "ours to the best peer"]]
    for name in figures:
        values = {peer: column.get(name, float("nan")) for peer, column in columns.items()}
        rows.append([name, *(number(value) for value in values.values()), _ratio(name, values, peers)])
    return aligned(rows)


def _ratio(name: str, values: dict[str, float], peers: list[str]) -> str:
    """Returns the ratio of ours to the best peer. Above 1, ours is better: more tokens or fewer milliseconds."""
    theirs = [values[peer] for peer in peers if values[peer] == values[peer]]
    ours = values.get(OURS, float("nan"))
    if not theirs or ours != ours or name.endswith("failed"):
        return number(float("nan"))
    return f"{ours / max(theirs):.2f}" if name.endswith("tokens/s") else f"{min(theirs) / ours:.2f}"


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

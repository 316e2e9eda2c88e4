"""Runs a coding agent's session against servers: `python -m bench.agent --model FILE.gguf [--servers NAME,...]`.

The session has twenty tools, a system prompt of 3,000 tokens, files that are read by tools, and twelve turns that grow
to about 16,000 tokens: calls, questions, two edits that copy most of a file of 300 lines, and an answer by a schema. It
is the same for every server, and greedy. The model's calls are executed in a deterministic world (world.py).

    python -m bench.agent --url http://localhost:8000 [--url ...]     servers that run already
    python -m bench.agent --model FILE.gguf --servers all             servers started here, one after another
"""

import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan, nan
from pathlib import Path
from typing import Any

from bench.agent.script import script
from bench.agent.servers import SERVERS, started, with_flags
from bench.agent.session import Turned, run
from bench.checkpoints import cache_folder
from bench.client.load_client import Target
from bench.client.server import BenchError, running
from bench.client.summary import NOTHING, aligned, number, to_json
from shared.config.declaration import ConfigError
from shared.config.flags import Parser, comma_separated, new_file, positive_float

Sessions = dict[str, list[Turned]]  # server → its turns


def main(words: list[str]) -> int:
    try:
        args = _parser().read(words)
        sessions = {name: session for name, session in _sessions(args)}
        if not sessions:
            raise ConfigError("there is no server to measure: give --url, or --model for servers that are started here")
        print(report(sessions))
        if args.json:
            args.json.write_text(to_json({name: [figures(one) for one in turns] for name, turns in sessions.items()}))
    except (ConfigError, BenchError) as error:
        print(f"python -m bench.agent: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _parser() -> Parser:
    parser = Parser(prog="python -m bench.agent", description="Runs a coding agent's session against servers.")
    add = parser.add_argument
    add("--url", action="append", default=[], metavar="URL", help="a server that runs already; may be repeated")
    add("--name", default="", help="the model's name at --url [default: the server's first model]")
    add("--model", type=Path, metavar="FILE", help="a GGUF file (for Sluice, any model) for the servers started here")
    add("--servers", type=comma_separated(SERVERS, every=SERVERS), default="sluice,sluice without drafts",
        metavar="NAME,...", help=f"servers to start, of {', '.join(SERVERS)} [default %(default)s]")  # fmt: skip
    add("--also", type=with_flags, action="append", default=[], metavar='"--flag value ..."',
        help="start another Sluice with these flags; may be repeated, as --also='...'")  # fmt: skip
    add("--scale", type=positive_float, default=1.0, help="multiplies all lengths [default %(default)s]")
    add("--tool-choice", choices=("auto", "required", "named"), default="auto",
        help="of turns that ask for a call; small models rarely call by themselves [default %(default)s]")  # fmt: skip
    add("--long-edits", action="store_true",
        help="write_file demands a content as long as the file: small models break edits off after a line")  # fmt: skip
    add("--root", type=Path, default=cache_folder() / "peers", help="folder in which other servers are installed")
    add("--json", type=new_file, metavar="FILE", help="write the figures of all turns")
    return parser


def _sessions(args: Namespace) -> Iterator[tuple[str, list[Turned]]]:
    """Yields each server's name and turns. Raises BenchError."""
    told = script(args.scale, long_edits=args.long_edits)
    for name, server in _servers(args):
        print(f"{name}:", file=sys.stderr)
        with server as target:
            yield name, run(target, told, args.tool_choice, lambda turned: print(_line(turned), file=sys.stderr))


def _servers(args: Namespace) -> Iterator[tuple[str, Any]]:
    for url in args.url:
        yield url, _at(url, args.name)
    if args.model is not None:
        for peer in [*(SERVERS[name] for name in args.servers), *args.also]:
            yield peer.name, started(peer, args.root.absolute(), args.model.absolute())


@contextmanager
def _at(url: str, name: str) -> Iterator[Target]:
    yield running(url, name)


# The report.


def figures(turned: Turned) -> dict[str, Any]:
    """Returns the figures of one turn. Times are in seconds; nan: not measured."""
    answer = turned.answer
    return {
        "turn": turned.turn.name, "depth": answer.prompt_tokens, "computed": answer.computed, "ttft": answer.first,
        "tokens": answer.tokens, "decode_s": answer.decode_s, "wall": answer.last, "valid": turned.valid,
        "invalid": turned.invalid, "as_asked": turned.kept, "finish": answer.finish, "error": answer.error,
    }  # fmt: skip


def report(sessions: Sessions) -> str:
    """Returns Markdown: a table of all servers, and a table of the turns of each."""
    names = list(sessions)
    first = sessions[names[0]]
    rows = [["session", *names]]
    summaries = [_summary(turns, first) for turns in sessions.values()]
    rows += [[title, *(summary[title] for summary in summaries)] for title in summaries[0]]
    return "\n\n".join([aligned(rows), *(_turns(name, turns) for name, turns in sessions.items())])


def _summary(turns: list[Turned], first: list[Turned]) -> dict[str, str]:
    told = [figures(one) for one in turns]
    decoding = [one for one in told if not isnan(one["decode_s"])]
    seconds = sum((one["tokens"] - 1) / one["decode_s"] for one in decoding)
    judged = [one for one in told if one["as_asked"] is not None]
    alike = sum(one.answer.text == other.answer.text and one.answer.calls == other.answer.calls
                for one, other in zip(turns, first, strict=True))  # fmt: skip
    return {
        "wall clock, s": number(sum(one["wall"] for one in told if not isnan(one["wall"]))),
        "prompt tokens": number(sum(one["depth"] for one in told)),
        "prompt tokens computed": number(sum(one["computed"] for one in told if not one["error"])),
        "first tokens together, s": number(sum(one["ttft"] for one in told if not isnan(one["ttft"]))),
        "tokens written": number(sum(one["tokens"] for one in told)),
        "decode, tokens/s": number(sum(one["tokens"] - 1 for one in decoding) / seconds if seconds else nan),
        "calls: valid, invalid": f"{sum(one['valid'] for one in told)}, {sum(one['invalid'] for one in told)}",
        "turns as asked": f"{sum(one['as_asked'] for one in judged)} of {len(judged)}",
        "failed requests": str(sum(bool(one["error"]) for one in told)),
        "answers like the first server's": f"{alike} of {len(turns)}",
    }


def _turns(name: str, turns: list[Turned]) -> str:
    rows = [[name, "prompt", "computed", "TTFT, s", "tokens", "tokens/s", "calls: valid, invalid", "as asked"]]
    for turned in turns:
        told = figures(turned)
        kept = {None: NOTHING, True: "yes", False: "no"}[told["as_asked"]]
        rows.append([
            told["turn"], *(number(told[key]) for key in ("depth", "computed", "ttft", "tokens", "decode_s")),
            f"{told['valid']}, {told['invalid']}", told["error"] or kept,
        ])  # fmt: skip
    return aligned(rows)


def _line(turned: Turned) -> str:
    return ", ".join(
        f"{key} {number(value) if isinstance(value, float) else value}" for key, value in figures(turned).items()
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""`sluice replay FILE --url URL`: checks before a rollout that the new server gives the recorded answers."""

import sys
from pathlib import Path

from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.replay import model_names, plot
from deploy.replay.record_file import read_record
from deploy.replay.report import latencies, report
from deploy.replay.sending import replay
from shared.arguments import new_file, positive_int
from shared.flags import Parser


def parser() -> Parser:
    parser = Parser(
        prog="sluice replay",
        description="Send the requests of a record to a server, and compare its answers with the recorded ones. The "
        "exit code is 0 if all are identical, else 1. A server makes a record with --record FILE --record-text.",
    )
    parser.add_argument("file", type=Path, help="the record")
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    add_key(parser)
    parser.add_argument(
        "--model", metavar="[OLD=]NEW", action="append", default=[],
        help="replaces the model's name in the requests, or only the name OLD; may be repeated (default: names that "
        "the server does not have are replaced by the name of its model if the record is of one model)",
    )  # fmt: skip
    parser.add_argument(
        "--pace", choices=("recorded", "max"), default="recorded",
        help="recorded: send requests as they arrived; max: as fast as they are answered (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--concurrency", type=positive_int, default=32, help="how many requests run at a time (default: %(default)s)"
    )
    parser.add_argument("--plot", type=new_file, metavar="FILE.png", help="draw the latencies; needs matplotlib")
    return parser


def run(words: list[str]) -> int:
    """Replays a record, prints the report and returns the exit code. Raises CliError when nothing can be replayed."""
    args = parser().read(words)
    if args.plot:
        plot.check(args.plot)
    given = model_names.parse(args.model)
    record, server = read_record(args.file), Server(args.url, args.api_key)
    names = given or model_names.proposed(record.requests, server.models())
    requests = model_names.renamed(record.requests, names)
    notes = [*record.notes, *(f"model {old} was sent as {new}" for old, new in names.items() if not given)]
    results = replay(
        server, requests, paced=args.pace == "recorded", concurrency=args.concurrency,
        on_done=_show if sys.stderr.isatty() else lambda count: None,
    )  # fmt: skip
    print(*report(results, server.url, notes), sep="\n")
    if args.plot:
        plot.draw(latencies(results), args.plot)
    return int(any(one.error or one.difference for one in results))


def _show(count: int) -> None:
    print(f"\r{count} answered", end="\r", file=sys.stderr)

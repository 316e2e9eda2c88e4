"""`sluice replay`: sends recorded requests again, compares the answers, and reports differences and times."""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from deploy.cli.http_client import DEFAULT_URL, Server, add_key
from deploy.cli.replay_requests import LATE_S, Difference, Part, Replayed, read_record, replay
from deploy.launcher.child_command import CliError
from shared.config.flags import Parser, new_file, positive_int
from shared.record import RecordedRequest

CONTEXT = 40  # characters that are shown of each text, from the first difference on
COLUMNS = ("p50", "p95", "p99", "max")
Latencies = tuple[str, Sequence[float], Sequence[float]]  # name, recorded times, replayed times


def report(results: Sequence[Replayed], url: str, notes: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines of the report."""
    yield f"{len(results)} requests of {_fingerprints([one.request.fingerprint for one in results])}"
    yield f"were sent to {url}, {_fingerprints([one.fingerprint for one in results if not one.error])}"
    yield from (f"note: {note}" for note in notes)
    late = sum(one.late_s > LATE_S for one in results)
    if late:
        yield f"note: {late} requests were sent more than {LATE_S:g} s late: raise --concurrency"
    for one in results:
        if one.error:
            yield f"error: {_name(one.request)}: {one.error}"
        elif one.difference:
            yield f"different: {_name(one.request)}: {_described(one.difference)}"
    yield from _table(latencies(results))
    different = sum(one.difference is not None for one in results)
    errors = sum(bool(one.error) for one in results)
    yield f"{len(results) - different - errors} identical, {different} different, {errors} errors"


def latencies(results: Sequence[Replayed]) -> list[Latencies]:
    """Returns recorded and replayed times of the answers that arrived: TTFT of streams, and total time."""
    arrived = [one for one in results if not one.error]
    streams = [one for one in arrived if one.request.stream and one.request.ttft_ms is not None]
    return [
        ("first token", [one.request.ttft_ms or 0.0 for one in streams], [one.ttft_ms for one in streams]),
        ("whole answer", [one.request.total_ms for one in arrived], [one.total_ms for one in arrived]),
    ]


def _fingerprints(found: Sequence[str]) -> str:
    names = [name or "no fingerprint" for name, _ in Counter(found).most_common()]
    return " and ".join(names) or "which answered none"


def _name(request: RecordedRequest) -> str:
    return f"{request.request_id} {request.route}"


def _described(found: Difference) -> str:
    recorded, replayed = (_from(part, found.position) for part in (found.recorded, found.replayed))
    unit = "character" if isinstance(found.recorded, str) else "number"
    return f"{found.path} from {unit} {found.position} on: recorded {recorded}, replayed {replayed}"


def _from(part: Part, position: int) -> str:
    return repr(part[position:][:CONTEXT]) if isinstance(part, str) else ", ".join(part[position:][:3])


def _table(rows: Sequence[Latencies]) -> Iterator[str]:
    yield f"{'milliseconds':<24}" + "".join(f"{name:>10}" for name in COLUMNS)
    for name, recorded, replayed in rows:
        if recorded:
            for which, times in (("recorded", recorded), ("replayed", replayed)):
                yield f"{name + ', ' + which:<24}" + "".join(f"{value:10.1f}" for value in _quantiles(times))


def _quantiles(times: Sequence[float]) -> list[float]:
    ordered = sorted(times)
    return [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.95, 0.99, 1.0)]


# `sluice replay FILE --url URL`: checks before a rollout that the new server gives the recorded answers.


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
        check(args.plot)
    given = parse(args.model)
    record, server = read_record(args.file), Server(args.url, args.api_key)
    names = given or proposed(record.requests, server.models())
    requests = renamed(record.requests, names)
    notes = [*record.notes, *(f"model {old} was sent as {new}" for old, new in names.items() if not given)]
    results = replay(
        server, requests, paced=args.pace == "recorded", concurrency=args.concurrency,
        on_done=_show if sys.stderr.isatty() else lambda count: None,
    )  # fmt: skip
    print(*report(results, server.url, notes), sep="\n")
    if args.plot:
        draw(latencies(results), args.plot)
    return int(any(one.error or one.difference for one in results))


def _show(count: int) -> None:
    print(f"\r{count} answered", end="\r", file=sys.stderr)


# Plots the latencies of a replay: the share of answers that had arrived after each time. Needs matplotlib.

BAD_USE = 2  # exit code
FORMATS = (".png", ".svg", ".pdf")


def check(path: Path) -> None:
    """Raises CliError if the picture could not be drawn. Called before any request is sent."""
    if path.suffix not in FORMATS:
        raise CliError(f"--plot {path}: its name must end with {', '.join(FORMATS)}", BAD_USE)
    if find_spec("matplotlib") is None:
        raise CliError("--plot needs matplotlib: pip install matplotlib", BAD_USE)


def draw(rows: Sequence[Latencies], path: Path) -> None:
    """Writes the picture. Raises CliError when the file cannot be written."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, (name, recorded, replayed) in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        for label, times in (("recorded", recorded), ("replayed", replayed)):
            axes.step(sorted(times), [100 * (i + 1) / len(times) for i in range(len(times))], label=label)
        axes.set(title=name, xlabel="milliseconds", ylabel="% of the answers", ylim=(0, 100))
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise CliError(f"--plot {path} cannot be written: {error.strerror}", BAD_USE) from error


# Translates names of models, because the server may have another name for its model than the recorded server had.

ALL = ""  # as an old name: stands for every recorded name


def parse(words: Sequence[str]) -> dict[str, str]:
    """Returns old name → new name, from texts like "NEW" and "OLD=NEW". Raises CliError for any other text."""
    names = {}
    for word in words:
        old, _, new = word.rpartition("=")
        if not new or word.startswith("="):
            raise CliError(f"--model must be NEW or OLD=NEW, not {word!r}", 2)
        names[old] = new
    return names


def proposed(requests: Sequence[RecordedRequest], served: Sequence[str]) -> dict[str, str]:
    """Returns recorded name → the server's name, for recorded names that the server lacks. Empty unless all requests
    were for the same model.

    served: the names that the server has for its model.
    """
    if not served or len({request.model for request in requests}) != 1:
        return {}
    recorded = {name for request in requests if isinstance(name := request.request.get("model"), str)}
    return {name: served[0] for name in sorted(recorded) if name and name not in served}


def renamed(requests: Sequence[RecordedRequest], names: Mapping[str, str]) -> list[RecordedRequest]:
    """Returns the requests with the new names of models in their bodies."""
    return [_renamed(request, names) for request in requests]


def _renamed(request: RecordedRequest, names: Mapping[str, str]) -> RecordedRequest:
    new = names.get(str(request.request.get("model", ALL))) or names.get(ALL)
    return msgspec.structs.replace(request, request=request.request | {"model": new}) if new else request

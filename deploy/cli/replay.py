"""Writes the report of a replay: the differences, a table of latencies, and the verdict in the last line."""

from collections import Counter
from collections.abc import Iterator, Sequence

from deploy.replay.answers import Difference, Part
from deploy.replay.sending import LATE_S, Replayed
from shared.logs.record import RecordedRequest

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

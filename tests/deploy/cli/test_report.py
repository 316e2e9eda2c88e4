"""The report of a replay states differences, errors, latencies and a verdict."""

from deploy.cli.replay import report
from deploy.cli.replay_requests import Difference, Replayed
from tests.deploy.cli.requests import recorded


def test_report_names_differences_errors_latencies_and_the_verdict() -> None:
    results = [
        Replayed(recorded(stream=True), None, "", "fp_new", 5.0, 40.0),
        Replayed(recorded(request_id="r2"), Difference("choices[0].text", 3, "hello", "help"), "", "fp_new", 6.0, 60.0),
        Replayed(recorded(request_id="r3"), error="full (HTTP 503)", late_s=2.0),
    ]
    assert list(report(results, "http://b", ["the last line is incomplete"])) == [
        "3 requests of fp_old",
        "were sent to http://b, fp_new",
        "note: the last line is incomplete",
        "note: 1 requests were sent more than 1 s late: raise --concurrency",
        "different: r2 /v1/completions: choices[0].text from character 3 on: recorded 'lo', replayed 'p'",
        "error: r3 /v1/completions: full (HTTP 503)",
        "milliseconds                   p50       p95       p99       max",
        "first token, recorded         10.0      10.0      10.0      10.0",
        "first token, replayed          5.0       5.0       5.0       5.0",
        "whole answer, recorded        20.0      20.0      20.0      20.0",
        "whole answer, replayed        60.0      60.0      60.0      60.0",
        "1 identical, 1 different, 1 errors",
    ]


def test_report_of_errors_alone_has_no_latencies() -> None:
    lines = list(report([Replayed(recorded(), error="no answer")], "http://b"))
    assert lines[1] == "were sent to http://b, which answered none"
    assert lines[-1] == "0 identical, 0 different, 1 errors" and "recorded" not in "".join(lines)

"""`sluice bench workloads` as users see it: mistakes, missing or failing servers, and the files that it writes."""

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main, tables
from bench.client.load_client import Record, Target
from bench.client.server import BenchError, free_port, served
from bench.client.workloads import Scale, chosen
from bench.workloads import measure as measuring
from bench.workloads.measure import MODES, Plan, measure, progress
from deploy.cli import main as cli
from deploy.launcher.child_command import SERVE_FLAGS
from shared.config.flags import Parser, add_flags, read
from tests.bench.fake_server import event
from tests.bench.results import PNG, records, result

Answer = Callable[[int], tuple[int, bytes]]


class Handler(BaseHTTPRequestHandler):
    answer: Answer
    count = 0
    room = 2048

    def do_GET(self) -> None:
        self._send(200, json.dumps({"data": [{"id": "one", "max_model_len": self.room}]}).encode())

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        type(self).count += 1
        self._send(*type(self).answer(type(self).count))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def good(count: int) -> tuple[int, bytes]:
    return 200, event("a", 1) + event("b", 2) + event("c", 4) + event(None, 4) + b"data: [DONE]\n\n"


@contextmanager
def server(answer: Answer = good, room: int = 2048) -> Iterator[str]:
    handler = type("Told", (Handler,), {"answer": staticmethod(answer), "room": room})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listener:
        thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.server_address[1]}"
        finally:
            listener.shutdown()
            thread.join()


def bench(*words: str) -> int:
    return cli.main(["bench", "workloads", *words])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "either --url"),
        (["--url", "http://x", "--serve", "demo"], 2, "either --url"),
        (["--url", "x:8000"], 2, "begins with http://"),
        (["--url", "http://x", "--compare", "paged"], 2, "--compare need"),
        (["--serve", "demo", "--model", "m"], 2, "--model goes with --url"),
        (["--serve", "demo", "--vocab", "300"], 2, "above 300"),
        (["--serve", "demo", "--length-scale", "0"], 2, "above 0"),
        (["--serve", "demo", "--rate-scal", "2"], 2, "did you mean --rate-scale?"),
        (
            ["--serve", "demo", "--workload", "baseline,nonsense"],
            2,
            "--workload: 'nonsense' is not one of all, baseline",
        ),
        (["--serve", "demo", "--compare", "paged,nonsense"], 2, "--compare: 'nonsense' is not one of static"),
        (["--serve", "demo", "--json", "/nowhere/at/all.json"], 2, "--json: /nowhere/at/all.json cannot be written"),
        (["--url", f"http://127.0.0.1:{free_port()}"], 1, "no server answers"),
    ],
)
def test_invalid_flags_give_one_sentence(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == code
    out, err = capsys.readouterr()
    assert err.startswith("sluice bench: ")
    assert said in err
    assert (out, err.count("\n")) == ("", 1)


def test_help_names_workloads_modes_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["workloads", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0
    assert all(word in text for word in (*(workload.name for workload in chosen("all")), *MODES, "--length-scale"))
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "sluice bench [quick|workloads|gpu]" in capsys.readouterr().out


def test_quick_knows_its_models_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "quick", "--models", "demo,nonsense"]) == 2
    assert capsys.readouterr().err.startswith("sluice bench: argument --models: 'nonsense' is not one of demo, ")


@pytest.mark.parametrize("words", [[], ["quick"]])
def test_command_without_workloads_runs_quick(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.quick.quick", lambda models, out: f"{models}, {out}")
    assert cli.main(["bench", *words, "--models", "demo,tiny", "--json", "x"]) == 0
    assert capsys.readouterr().out == "('demo', 'tiny'), x\n"


def test_workloads_command_measures_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("a.json", "a.html", "a.png")]
    flags = [word for file in files for word in (f"--{file.suffix[1:]}", str(file))]
    with server() as url:
        assert bench("--url", url, "--workload", "baseline,continuous_batching", "--rate-scale", "200", *flags) == 0
    out, err = capsys.readouterr()
    assert re.search(r"requests +\| +10 \| +32 \|", out)
    assert "continuous_batching, as it runs: 32 of 32" in err
    results = json.loads(files[0].read_text())["results"]
    assert [len(result["records"]) for result in results] == [10, 32]
    assert results[0]["summary"]["hit_share"] == pytest.approx(400 / 7)
    assert sum(results[0]["records"][0]["counts"]) == 4
    assert files[1].read_text().count("data:image/png;base64,") == 2
    assert files[2].read_bytes().startswith(PNG)


def test_some_503s_are_failures_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    busy = (503, b'{"error": {"message": "the waiting queue is full"}}')
    with server(lambda count: busy if count > 6 else good(count)) as url:
        assert bench("--url", url, "--workload", "baseline") == 0
    out = capsys.readouterr().out
    assert re.search(r"failed +\| +6 \|", out)
    assert "baseline, as it runs: 6 failed: 503: the waiting queue is full" in out


@pytest.mark.parametrize("answered", [0, 2])
def test_workload_with_only_failures_reports_the_reason(answered: int, capsys: pytest.CaptureFixture[str]) -> None:
    with server(lambda count: good(count) if count <= answered else (422, b'{"error": {"message": "no"}}')) as url:
        assert bench("--url", url, "--workload", "baseline") == 1
    assert "sluice bench: baseline: " in (err := capsys.readouterr().err)
    assert "422: no" in err


def test_server_that_dies_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gives some answers and then dies."""
    with server() as url:
        target = Target(url, "one")
    mixed = [*records(3), Record(error="connection lost or refused (ConnectionResetError)")]
    monkeypatch.setattr(measuring, "_check_fits", lambda *args: None)
    monkeypatch.setattr(measuring, "_run", lambda *args: mixed)
    plan = Plan(chosen("baseline"), Scale(), 1500)
    with pytest.raises(BenchError, match=r"the server died; 1 requests failed: connection lost"):
        list(measuring._workloads(plan, target, "as it runs"))


def test_workload_that_does_not_fit_fails_before_sending() -> None:
    with server(room=1000) as url, pytest.raises(BenchError, match=r"accepts 1000: use --length-scale, 0\.\d+ times"):
        measure(Plan(chosen("chunked_prefill"), Scale(), 1500, url=url))


def test_unknown_model_error_lists_the_served_models() -> None:
    with server() as url, pytest.raises(BenchError, match=r"does not serve 'two' but one"):
        measure(Plan(chosen("baseline"), Scale(), 1500, url=url, model="two"))


def test_server_that_fails_to_start_reports_the_reason() -> None:
    with (
        pytest.raises(BenchError, match=r"ended with 2 before it was ready: .*--page-size"),
        served("demo", ["--page-size", "0"]),
    ):
        pass  # pragma: no cover


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_has_flags_that_serve_accepts(mode: str) -> None:
    parser = Parser(prog="serve")
    add_flags(parser, SERVE_FLAGS)
    read(parser.read(MODES[mode]), {}, SERVE_FLAGS)


def test_modes_run_one_after_another_with_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    @contextmanager
    def start(model: str, flags: tuple[str, ...]) -> Iterator[Target]:
        log.append((model, *flags))
        with server() as url:
            yield Target(url, "one")
        log.append("ended")

    monkeypatch.setattr(measuring, "served", start)
    results = measure(
        Plan(chosen("baseline"), Scale(), 1500, serve="demo", flags=("--threads", "1"), modes=("paged", "contiguous"))
    )
    began = [("demo", "--threads", "1", "--kv-cache-backend", mode) for mode in ("paged", "contiguous")]
    assert log == [began[0], "ended", began[1], "ended"]
    assert [(result.mode, result.summary["requests"]) for result in results] == [("paged", 10), ("contiguous", 10)]


def test_progress_without_a_terminal_is_a_line_a_quarter(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 10) as report:
        for index in range(10):
            report(Record(error="x" if index == 5 else ""))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["work: 3 of 10", "work: 5 of 10", "work: 8 of 10, 1 failed", "work: 10 of 10, 1 failed"]


def test_progress_on_a_terminal_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress("work", 2) as report:
        report(Record())
        report(Record())
    assert "2/2" in capsys.readouterr().err


def test_tables_of_several_modes_have_ratios() -> None:
    text = tables([result("work", "one", records(5)), result("work", "two", records(5, 0.02))])
    assert re.search(r"\| work +\| +one \| +two \| ratio \|", text)
    assert re.search(r"\| ITL p50, ms +\| +10.0 \| +20.0 \| +2.00 \|", text)


def test_workloads_command_measures_a_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "--workload",
        "prefix_caching",
        "--length-scale",
        "0.04",
        "--rate-scale",
        "20",
        "--html",
        str(tmp_path / "h"),
    ]
    flags = ["--threads", "1", "--kv-cache-gb", "0.1"]
    assert bench("--serve", "demo", "--compare", "prefix", *asked, "--", *flags) == 0
    out = capsys.readouterr().out
    assert re.search(r"prefix +\| +prefix_caching \|", out)
    assert re.search(r"failed +\| +0 \|", out)
    [share] = re.findall(r"prompt tokens cached, % +\| +([\d.]+) \|", out)
    assert float(share) > 30
    assert "--kv-cache-gb 0.1" in (tmp_path / "h").read_text()


def test_compare_alone_compares_on_the_demo_model(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    monkeypatch.setattr("bench.__main__.measure", lambda plan: plans.append(plan) or [])
    monkeypatch.setattr("bench.__main__.tables", lambda results: "")
    assert main(["--compare", "static,continuous,chunked"]) == 0
    assert (plans[0].serve, plans[0].modes) == ("demo", ("static", "continuous", "chunked"))
    assert plans[0].workloads == chosen("all") and plans[0].scale.length < 1

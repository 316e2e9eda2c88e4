"""The checks of `sluice serve` before it starts a process."""

import pytest

from deploy.cli import main, processes
from deploy.launcher.run_dir import listen, reachable
from shared.config.settings import Settings, with_values
from worker.ops import native_build
from worker.ops.native_build import TIERS


def fail(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = main.main(argv)
    return code, capsys.readouterr().err.strip()


def test_serve_on_a_taken_port_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    [listener] = listen("127.0.0.1", 0)
    with listener:
        port = reachable(listener)[1]
        code, text = fail(capsys, "serve", "--model", "demo", "--port", str(port))
        assert (code, text.startswith(f"sluice serve: port {port} is already in use")) == (1, True)
        code, text = fail(capsys, "serve", "--model", "demo", "--port", "0", "--worker-metrics-port", str(port))
        assert (code, text.startswith(f"sluice serve: port {port} is already in use")) == (1, True)


@pytest.mark.parametrize("command", ["worker", "frontend", "serve"])
def test_tcp_without_keys_is_a_usage_error(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, text = fail(capsys, command, "--request-address=tcp://127.0.0.1:5700", "--event-address=tcp://127.0.0.1:5701")
    assert code == 2 and "--curve-dir, or --insecure" in text


@pytest.mark.parametrize("command", ["worker", "serve"])
def test_unknown_instruction_set_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("SLUICE_ISA", "sse")
    code, text = fail(capsys, command)
    known = ", ".join(TIERS[1:])
    assert (code, text) == (2, f"sluice {command}: SLUICE_ISA must be one of {known}, not 'sse'")


@pytest.mark.parametrize(
    "device, gpus, native, begins",
    [
        ("auto", [], "1", True), ("cpu", ["0"], "1", True),
        ("auto", ["0"], "1", False), ("cuda", [], "1", False), ("cpu", [], "0", False),
    ],
)  # fmt: skip
def test_kernels_for_the_cpu_are_begun_where_they_are_needed(
    device: str, gpus: list[str], native: str, begins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    monkeypatch.setattr(native_build, "begin", lambda: begun.append(True))
    monkeypatch.setattr(processes, "visible_gpus", lambda: gpus)
    monkeypatch.setenv("SLUICE_NATIVE", native)
    processes._begin_kernels(with_values(Settings(), {"device": device}))
    assert begun == [True] * begins


def test_serve_begins_the_kernels_before_it_fetches_a_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def fetch(settings: Settings) -> Settings:
        steps.append("fetch")
        raise processes.CliError("no model", 3)

    monkeypatch.setattr(native_build, "begin", lambda: steps.append("begin"))
    monkeypatch.setattr(processes, "with_default_model", fetch)
    monkeypatch.setattr(processes, "visible_gpus", list)
    assert fail(capsys, "serve") == (3, "sluice serve: no model") and steps == ["begin", "fetch"]

"""The checks of `sluice serve` before it starts a process."""

import pytest

from deploy.cli import main
from deploy.supervisor.listen_sockets import listen, reachable
from worker.kernels.cpu.instruction_set import TIERS


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

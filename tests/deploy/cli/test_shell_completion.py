"""`sluice completion`: the script for bash is run, the script for zsh is only read."""

import subprocess

import pytest

from deploy.cli.main import COMMANDS, TOOLS
from tests.deploy.cli.harness import sluice


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["comple"], ["complete", "completion"]),
        (["serve", "--kv-cache-b"], ["--kv-cache-backend"]),
        (["serve", "--kv-cache-backend", ""], ["paged", "contiguous"]),
        (["serve", "--kv-cache-backend", "=", "c"], ["contiguous"]),
        (["worker", "--no-use"], ["--no-use-chunked-prefill"]),
        (["worker", "--front"], []),
        (["chat", "--sys"], ["--system"]),
        (["serve", "--model", ""], []),  # the shell itself completes file names
    ],
)
def test_bash_completes_commands_flags_and_values(
    capsys: pytest.CaptureFixture[str], words: list[str], offered: list[str]
) -> None:
    _, script, _ = sluice(capsys, "completion", "bash")
    ask = f'COMP_WORDS=(sluice "$@"); COMP_CWORD={len(words)}; _sluice; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-uc", script + "\n" + ask, "bash", *words], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_zsh_script_has_every_command_and_flag(capsys: pytest.CaptureFixture[str]) -> None:
    _, script, _ = sluice(capsys, "completion", "zsh")
    assert all(f" {name}:'" in script for name in (*COMMANDS, *TOOLS))
    assert "--kv-cache-backend=[paged\\: pages of --page-size tokens" in script
    assert ':value:(paged contiguous)"' in script
    assert sluice(capsys, "completion", "fish")[0] == 2

"""The servers of an agent's session, as data: each serves one GGUF file to one client with a context of 32,768 tokens.

They are started as bench/peers starts them, one at a time, because one session is what is measured.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from bench.client.load_client import Target
from bench.peers import llama_cpp
from bench.peers.catalog import PEERS, Peer
from bench.peers.llama_cpp import Command
from bench.peers.servers import install, launched, wait_until_alive

CONTEXT = 32_768


def _sluice(root: Path, model: Path, port: int) -> Command:
    return [
        sys.executable, "-m", "deploy.cli.main", "serve", "--model", str(model), "--served-model-name", "m",
        "--port", str(port), "--worker-metrics-port", "0",
    ]  # fmt: skip


def _llama_cpp(root: Path, model: Path, port: int) -> Command:
    return [
        str(llama_cpp.programs(root) / "llama-server"), "-m", str(model), "-t", llama_cpp.threads(), "-c", str(CONTEXT),
        "-np", "1", "--jinja", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip


SERVERS = {
    peer.name: peer
    for peer in (
        replace(PEERS["sluice"], serve=_sluice),
        replace(
            PEERS["sluice"],
            name="sluice without drafts",
            serve=lambda root, model, port: [*_sluice(root, model, port), "--speculation", "off"],
        ),
        replace(PEERS["llama.cpp"], serve=_llama_cpp, prepare=lambda root, model: llama_cpp.link(root, "best")),
    )
}


def with_flags(flags: str) -> Peer:
    """Returns Sluice with more flags of `sluice serve`, under a name that shows them."""
    words = shlex.split(flags)
    name = " ".join(["sluice", *words]).replace("/", "_")
    return replace(SERVERS["sluice"], name=name, serve=lambda *where: [*_sluice(*where), *words])


@contextmanager
def started(peer: Peer, root: Path, model: Path) -> Iterator[Target]:
    """Installs a server if it is missing, starts it, and ends it on exit. Raises BenchError."""
    install(peer, root, model)
    with launched(peer, root, model) as (target, process):
        wait_until_alive(peer, target, process)
        yield target

"""Measures the CPU time that each server spends per streamed token outside of the model, on a model of one tiny layer.

The process that listens on the port carries the streams; the other processes compute, schedule and supervise.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from bench.client.summary import aligned
from bench.micro.frontend import DONE, Process
from bench.micro.scripted_worker import connected_streams, request
from bench.packages import psutil
from bench.peers.catalog import Peer
from bench.peers.servers import PeerServer, started_peers

PROMPT = "def main"
# flags added to the catalog's flags, which they override
MORE_SEQUENCES = {"sluice": ["--max-batch-size", "256"], "vllm": ["--max-num-seqs", "256"]}


@dataclass(frozen=True, slots=True)
class Cost:
    """A server's CPU time in µs per token."""

    front: float  # CPU time of the process that clients connect to
    rest: float  # CPU time of all other processes together


def compare_serving(peers: list[Peer], root: Path, folder: Path, streams: list[int], tokens: int) -> str:
    """Measures all servers with each number of concurrent streams of `tokens` tokens. Returns a Markdown table; raises
    BenchError."""
    rows = [["CPU µs a token: front, rest", *(f"{count} streams" for count in streams)]]
    with started_peers([_with_more_sequences(peer) for peer in peers], root.absolute(), folder) as servers:
        for server in servers:
            with server.resumed():
                costs = [_measured(server, count, tokens) for count in streams]
            rows.append([server.peer.name, *(f"{cost.front:.1f}, {cost.rest:.1f}" for cost in costs)])
    return aligned(rows)


def _with_more_sequences(peer: Peer) -> Peer:
    return replace(
        peer, serve=lambda root, folder, port: [*peer.serve(root, folder, port), *MORE_SEQUENCES.get(peer.name, [])]
    )


def _measured(server: PeerServer, streams: int, tokens: int) -> Cost:
    """Measures two rounds and returns the costs in the second."""
    port = int(server.target.url.rpartition(":")[2])
    body = {"model": server.target.model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    front, rest = _processes(server.process, port)
    for _ in range(2):
        before = front.cpu(), sum(one.cpu() for one in rest)
        with connected_streams([port], streams) as clients:
            clients.send(request("/v1/completions", body))
            clients.read(1, DONE)
        spent = front.cpu() - before[0], sum(one.cpu() for one in rest) - before[1]
    return Cost(*(1e6 * part / (streams * tokens) for part in spent))


def _processes(root: psutil.Process, port: int) -> tuple[Process, list[Process]]:
    """Returns the process that accepts connections at `port`, and all others. Parents pass their sockets on to their
    children, so of the listening processes, the youngest accepts connections."""
    family = [root, *root.children(recursive=True)]
    front = [one.pid for one in family if port in _listens(one)][-1]
    return Process(front, port), [Process(one.pid, port) for one in family if one.pid != front]


def _listens(process: psutil.Process) -> set[int]:
    return {one.laddr.port for one in process.net_connections() if one.status == psutil.CONN_LISTEN}

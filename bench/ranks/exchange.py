"""Measures an exchange of rows between two ranks: by shared memory, by TCP, and by torch.distributed's gloo.

    python -m bench.ranks.exchange [--width 1024]

Two processes on this machine exchange the same rows in each way. No network is involved, so the times are those of the
operating system and the libraries. Across hosts, add the network's latency to each exchange.
"""

import argparse
import contextlib
import io
import mmap
import os
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed
from torch import Tensor

from worker.distributed.handshake import prepare
from worker.ops.exchange import RanksC, shared_bytes

ROUNDS = 200
ROWS = (1, 8, 32, 512)
CAPACITY = 8 << 20

Gather = Callable[[Tensor], object]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs = listener.accept()[0]
    for link in (ours, theirs):
        prepare(link)
    return ours, theirs


def by_gloo(port: int, rank: int) -> Gather:
    with contextlib.redirect_stdout(io.StringIO()):
        torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def gather(own: Tensor) -> None:
        parts = [torch.empty_like(own) for _ in range(2)]
        torch.distributed.all_gather(parts, own)
        torch.cat(parts, dim=1)

    return gather


def seconds(gather: Gather, align: RanksC, rows: int, columns: int) -> float:
    """Returns the median seconds in which a rank exchanges `rows` rows of `columns` columns."""
    own, took = torch.randn(rows, columns).bfloat16(), []
    for _ in range(ROUNDS):
        align.gather(torch.zeros(1, 1))  # synchronizes the two ranks
        begun = time.perf_counter()
        gather(own)
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def compare(width: int) -> None:
    shared = [mmap.mmap(-1, shared_bytes(CAPACITY)) for _ in range(2)]
    links = tcp_pair()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    torch.set_num_threads(1)  # a process with more than one thread must not fork
    child = os.fork()
    rank = 0 if child else 1
    align = RanksC(shared[0], rank, 2)
    own_memory = mmap.mmap(-1, shared_bytes(CAPACITY))
    ways: dict[str, Gather] = {
        "memory": RanksC(shared[1], rank, 2).gather,
        "TCP": RanksC(own_memory, rank, 2, {1 - rank: links[rank]}).gather,
        "gloo": by_gloo(port, rank),
    }
    found = {rows: {way: seconds(gather, align, rows, width // 2) for way, gather in ways.items()} for rows in ROWS}
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for rows, by_way in found.items():
        print(f"{rows:4} rows of {width}:", ", ".join(f"{way} {took * 1e6:.0f} µs" for way, took in by_way.items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks.exchange", description=__doc__)
    parser.add_argument("--width", type=int, default=1024, help="of a row, of which each process has half")
    compare(parser.parse_args().width)


if __name__ == "__main__":
    main()

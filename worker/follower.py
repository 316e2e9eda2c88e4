"""The process of a rank other than 0: `python -m worker.follower PARENT SOCKET MEMORY`.

Rank 0 starts it. PARENT is the process id of rank 0. SOCKET and MEMORY are file descriptors.

It loads its part of the model and computes the steps that rank 0 orders. It ends when rank 0 ends, or at its first
error. After an error the whole worker is restarted, as after every crash.
"""

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from shared.config import WorkerConfig
from worker.engine.load_model import ModelFiles, find_model
from worker.kernels.cpu import bindings
from worker.kernels.cpu.huge_pages import huge_pages
from worker.kernels.cpu.ranks_c import RanksC
from worker.kv_cache.sizing import WeightsSize
from worker.kv_cache.tensors import KVCache
from worker.model.decoder import Decoder
from worker.model.device import threads_of
from worker.model.layer import Weights
from worker.model.share import Share
from worker.model.weights import load
from worker.ranks.checks import checksums, checksums_from_checkpoint
from worker.ranks.frames import BOTH, HIDDEN, LOGITS, Beginning, Loaded, Order, Sizes, inputs_of, receive, rows_of, send
from worker.ranks.nodes import stay_on_node
from worker.ranks.part import PartDecoder

PR_SET_PDEATHSIG = 1


def main(orders: socket.socket, memory: int) -> None:
    begin = msgspec.msgpack.decode(receive(orders), type=Beginning)
    stay_on_node(begin.rank, begin.count)
    torch.set_num_threads(threads_of(begin.worker))
    files = find_model(begin.model, begin.worker, torch.device("cpu"), prefer_cache=True)
    ranks = RanksC(mmap.mmap(memory, begin.memory), begin.rank, begin.count)
    compute(load_part(files, begin.worker, orders, ranks), orders)


def compute(part: PartDecoder, orders: socket.socket) -> NoReturn:
    """Computes the orders of rank 0. Raises EOFError when rank 0 has ended, and RankLost if another rank is gone."""

    def hidden(given: Order) -> Tensor:
        return part.hidden(inputs_of(given), checked=given.checked)

    by_name: dict[str, Callable[[Order], object]] = {
        HIDDEN: hidden,
        LOGITS: lambda given: part.logits(rows_of(given)),
        BOTH: lambda given: part.logits(hidden(given)),
    }
    decoder = msgspec.msgpack.Decoder(Order)
    with torch.inference_mode():
        while True:
            given = decoder.decode(receive(orders))
            by_name[given.compute](given)


def load_part(
    files: ModelFiles,
    worker: WorkerConfig,
    orders: socket.socket,
    ranks: RanksC,
    content: Callable[[], str] = str,
    on_size: Callable[[WeightsSize], None] = lambda size: None,
    on_weights: Callable[[], None] = lambda: None,
) -> PartDecoder:
    """Loads the part of this rank, and tells rank 0 when it is ready. Raises CheckpointError and CannotShare.

    content: returns the hash of the weight files, which rank 0 compares with its own; "" if both read the same files.
    on_size: see load() of worker/model/weights.py. on_weights: called when the weights are loaded.
    """
    share, device, formats = Share(ranks.rank, ranks.count), files.device, files.formats
    weights = load(
        files.folder, files.spec, formats.dtype, device, invariant=worker.batch_invariant, memory=formats.memory,
        on_size=on_size, share=share,
    )  # fmt: skip
    on_weights()
    size = msgspec.msgpack.decode(receive(orders), type=Sizes).size
    spec = share.spec(files.spec)
    cache = KVCache(
        spec, size.pages, size.page_size, formats.kv_dtype, device, size.groups, size.state_slots, formats.dtype
    )
    for tensor in (*cache.k, *cache.v):
        huge_pages(tensor)
    cache.prefault_ahead(bindings.touch_pages)
    part = PartDecoder(Decoder(spec, weights, size.max_seq_len), cache, ranks)
    send(orders, msgspec.structs.replace(_loaded(files, worker, weights, share), content=content()))
    return part


def _loaded(files: ModelFiles, worker: WorkerConfig, weights: Weights, share: Share) -> Loaded:
    if not worker.rank_check_weights:
        return Loaded()
    return Loaded(checksums(weights), checksums_from_checkpoint(files.stored(worker), share.next, lambda: None))


def _end_with_parent() -> None:
    """Lets the system kill this process when rank 0 ends for any reason."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches all processes, and rank 0 drains first
        signal.signal(number, signal.SIG_IGN)


def start(words: Sequence[str]) -> None:
    """words: PARENT, SOCKET and MEMORY."""
    parent, source, shared = map(int, words)
    _end_with_parent()
    if os.getppid() == parent:  # otherwise, rank 0 has died already
        with contextlib.suppress(EOFError):
            main(socket.socket(fileno=source), shared)


if __name__ == "__main__":
    start(sys.argv[1:])

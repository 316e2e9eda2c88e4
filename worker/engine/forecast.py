"""Says how much memory a model will take, and what a decoded token reads, from the headers of its files alone.

    python -m worker.engine.forecast FOLDER BYTES     prints one JSON object (forecast); BYTES: memory for all of it

The sizes are those that the loader and the K/V pool compute, with the default settings, on the CPU. The weights are not
read, so each file of weights may be as long as it should be and hold only its header: a model can be judged before it
is downloaded.
"""

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from shared.config.check import check
from shared.config.declaration import ConfigError
from shared.config.settings import Settings, with_values
from shared.config.worker import with_default_sizes
from shared.machine import CPU_SHARE
from worker.checkpoint.checkpoint import CheckpointError, read_config
from worker.engine.numerics import choose_formats
from worker.kv_cache.sizing import PoolBudget, size_pool
from worker.kv_cache.tensors import bytes_per_page, cache_groups
from worker.models.config import spec_from_config
from worker.models.load import Loader, open_source

# A launcher, a worker and a frontend without weights and K/V: libraries and buffers, and for each token of the
# vocabulary its part of the tokenizers, tables and logits. Measured with vocabularies of 49,152 and 151,936 tokens.
PROCESSES_BYTES, TOKEN_BYTES = 295 << 20, 1900


def forecast(folder: Path, memory: int) -> dict[str, int | bool]:
    """Returns the fields of a Forecast (deploy/cli/verdict.py) for a checkpoint.

    memory: bytes that are available for everything

    Raises CheckpointError for a model that is not served, and ConfigError for one whose formats are not served here.
    """
    settings = check(with_values(Settings(), {"model": str(folder)}), ("model",))
    device, model = torch.device("cpu"), settings.model
    worker = replace(with_default_sizes(settings.worker, on_gpu=False), overlap=False)
    spec = spec_from_config(read_config(folder))
    formats = choose_formats(spec, worker, device)
    with closing(open_source(folder, None)) as source:
        loader = Loader(source, spec, formats.dtype, device, worker.batch_invariant, formats.memory)
        weights, read = loader.nbytes(), loader.bytes_of_a_token()
    groups = cache_groups(spec, spec.max_positions, paged=True)
    kv = sum(bytes_per_page(spec, group, 1, formats.kv_dtype, device) for group in groups if not group.window)
    processes = PROCESSES_BYTES + TOKEN_BYTES * spec.vocab_size
    left = memory - weights - processes
    pool = context = 0
    if left > 0:
        budget = PoolBudget(int(CPU_SHARE * left), "")
        try:
            size = size_pool(spec, formats.kv_dtype, device, budget, model, worker, formats.dtype)
            pool, context = size.nbytes, size.max_seq_len
        except ConfigError:  # not even a page fits
            pass
    return {
        "weights": weights, "read": read, "kv": kv, "pool": pool, "context": context, "trained": spec.max_positions,
        "layers": len(spec.layers), "sparse": spec.experts is not None, "processes": processes,
    }  # fmt: skip


def main(folder: str, memory: str) -> int:
    try:
        print(msgspec.json.encode(forecast(Path(folder), int(memory))).decode())
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

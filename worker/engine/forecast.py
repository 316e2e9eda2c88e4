"""Says how much memory a model will take, and what a decoded token reads, from the headers of its files alone.

    python -m worker.engine.forecast FOLDER BYTES [tried]     prints one JSON object: forecast and, with `tried`, trial

BYTES is the memory for all of it.

The sizes are those that the loader and the K/V pool compute, with the default settings, on the CPU. The weights are not
read, so each file of weights may be as long as it should be and hold only its header: a model can be judged before it
is downloaded. The speed is that of a trial (trial.py), for which a few layers are loaded.
"""

import os
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from worker.ops.openmp import spin_briefly

spin_briefly()  # must run before torch is imported

import torch  # noqa: E402

from shared.config.check import check  # noqa: E402
from shared.config.declaration import ConfigError  # noqa: E402
from shared.config.settings import Settings, with_values  # noqa: E402
from shared.config.worker import with_default_sizes  # noqa: E402
from shared.machine import CPU_SHARE  # noqa: E402
from worker.checkpoint.checkpoint import CheckpointError, read_config  # noqa: E402
from worker.engine.numerics import choose_formats  # noqa: E402
from worker.engine.trial import LEAST_CONTEXT, measure  # noqa: E402
from worker.kv_cache.sizing import PoolBudget, size_pool  # noqa: E402
from worker.kv_cache.tensors import bytes_per_page, cache_groups  # noqa: E402
from worker.models.config import spec_from_config  # noqa: E402
from worker.models.load import Loader, open_source  # noqa: E402
from worker.ops.native_build import existing, sets_in_use, sets_of_processor  # noqa: E402

# A launcher, a worker and a frontend without weights and K/V: libraries and buffers, and for each token of the
# vocabulary its part of the tokenizers, tables and logits. Measured with vocabularies of 49,152 and 151,936 tokens.
PROCESSES_BYTES, TOKEN_BYTES = 295 << 20, 1900


def forecast(folder: Path, memory: int) -> dict[str, Any]:
    """Returns the fields of a Forecast (deploy/cli/verdict.py) for a checkpoint.

    memory: bytes that are available for everything

    Raises CheckpointError for a model that is not served, and ConfigError for one whose formats are not served here.
    """
    settings = _settings(folder)
    device, model, worker = torch.device("cpu"), settings.model, settings.worker
    spec = spec_from_config(read_config(folder))
    formats = choose_formats(spec, worker, device)
    with closing(open_source(folder, None)) as source:
        loader = Loader(source, spec, formats.dtype, device, worker.batch_invariant, formats.memory)
        weights, read = loader.nbytes(), loader.bytes_of_a_token()
    groups = cache_groups(spec, spec.max_positions, paged=True)
    kv = [(group.window, bytes_per_page(spec, group, 1, formats.kv_dtype, device)) for group in groups]
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
        "weights": weights, "read": read, "kv": sum(nbytes for window, nbytes in kv if not window),
        "windows": [(window, nbytes) for window, nbytes in kv if window], "pool": pool, "context": context,
        "trained": spec.max_positions, "layers": len(spec.layers), "sparse": spec.experts is not None,
        "processes": processes,
    }  # fmt: skip


def trial(folder: Path, computed: dict[str, Any]) -> dict[str, float]:
    """Returns the fields of a Forecast that are measured, which takes a few seconds. computed: the other fields

    The result is empty if the model does not fit or its sequences are too short, if it has experts, if the input of a
    layer depends on all layers (Gemma 4's small models), or if the C library is not compiled yet. Raises the same
    errors as `forecast`.
    """
    library = existing(sets_in_use(os.environ, sets_of_processor())) if os.environ.get("SLUICE_NATIVE") != "0" else None
    settings, spec = _settings(folder), spec_from_config(read_config(folder))
    if spec.experts or spec.per_layer_inputs or computed["context"] < LEAST_CONTEXT or library is None:
        return {}
    formats = choose_formats(spec, settings.worker, torch.device("cpu"))
    try:
        return asdict(measure(folder, settings, formats, spec))
    except ConfigError:  # a pool of the trial's size is too small for this model
        return {}


def _settings(folder: Path) -> Settings:
    settings = check(with_values(Settings(), {"model": str(folder)}), ("model",))
    return replace(settings, worker=replace(with_default_sizes(settings.worker, on_gpu=False), overlap=False))


def main(folder: str, memory: str, tried: str = "") -> int:
    try:
        computed = forecast(Path(folder), int(memory))
        print(msgspec.json.encode(computed | (trial(Path(folder), computed) if tried else {})).decode())
    except (CheckpointError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

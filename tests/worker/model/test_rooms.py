"""A plain model loads and computes without the code that only other checkpoints need.

A room is the modules of one feature: a kind of mixer other than attention, mixtures of experts, a format of quantized
checkpoints, or GGUF.
"""

import json
import subprocess
import sys
from pathlib import Path

from tests.checkpoints import Checkpoints
from tests.patience import PATIENCE_S
from worker.model.feed_forward.kinds import KINDS as FEED_FORWARDS
from worker.model.mixers.kinds import KINDS as MIXERS
from worker.model.quantization.methods import METHODS

ROOT = Path(__file__).parents[3]
FORMATS = sorted(module for module in METHODS.values() if not module.startswith("gguf"))
# module under worker/model → a kind of checkpoint (tests/checkpoints.py) that needs it
LAYERS = {
    "mixers.delta_net": "qwen3_5", "mixers.mamba2": "granite-hybrid", "mixers.short_conv": "lfm2",
    "feed_forward.experts": "mixtral",
}  # fmt: skip
ROOMS = (*LAYERS, *FORMATS, "gguf")

# Arguments: a plain checkpoint, then pairs of a room and a checkpoint that needs the room. For each room, the program
# unloads all modules of worker/model, makes the room unimportable, prints the logits of the plain checkpoint, and the
# reason why the other checkpoint is refused.
PROGRAM = """
import sys
from pathlib import Path
import torch

def logits(plain):
    from worker.kv_cache.tensors import KVCache
    from worker.model.cpu_decoder import fastest_decoder
    from worker.model.decoder import Decoder
    from worker.model.inputs.forward_inputs import ForwardInputs
    from worker.model.weights import load
    spec = spec_of(plain)
    decoder = Decoder(spec, load(Path(plain), spec, torch.float32, torch.device("cpu"), invariant=False), 64)
    cache = KVCache(spec, (2,), 16, torch.float32, "cpu")
    inputs = ForwardInputs(
        token_ids=torch.tensor([5, 9, 2, 30]), positions=torch.arange(4), slot_mappings=(torch.arange(16, 20),),
        query_start_loc=torch.tensor([0, 4], dtype=torch.int32), seq_lens=torch.tensor([4], dtype=torch.int32),
        page_tables=(torch.tensor([[1]], dtype=torch.int32),), logits_indices=torch.tensor([3]), max_kv_len=4,
    )
    found = fastest_decoder(decoder, cache).forward(inputs, cache)
    return found.double().sum().item().hex(), found.max().item().hex()

def spec_of(folder):
    from worker.model.checkpoint.checkpoint import read_config
    from worker.model.families.families import spec_from_config
    return spec_from_config(read_config(Path(folder)))

def why_refused(folder):
    from worker.model.checkpoint.checkpoint import CheckpointError
    try:
        spec_of(folder)
    except CheckpointError as error:
        return str(error)

plain, *pairs = sys.argv[1:]
print(*logits(plain))
for room, folder in zip(pairs[::2], pairs[1::2], strict=True):
    for name in [name for name in sys.modules if name.startswith("worker.model")]:
        del sys.modules[name]
    sys.modules["worker.model." + room] = None
    print(*logits(plain))
    print(why_refused(folder))
"""


def in_need_of(room: str, checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """Returns a checkpoint that needs the room. For quantization and GGUF, a config suffices for the refusal."""
    if room in LAYERS:
        return checkpoints(LAYERS[room])
    method = next(name for name, module in METHODS.items() if module.startswith(room))
    config = json.loads((checkpoints("llama") / "config.json").read_text())
    folder = tmp_path / room
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    return folder


def test_a_plain_model_needs_no_other_room_and_what_needs_one_is_refused_in_words(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    plain = checkpoints("llama")
    pairs = [part for room in ROOMS for part in (room, str(in_need_of(room, checkpoints, tmp_path)))]
    command = [sys.executable, "-c", PROGRAM, str(plain), *pairs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    whole, *told = done.stdout.splitlines()
    assert told[::2] == [whole] * len(ROOMS)
    for room, refusal in zip(ROOMS, told[1::2], strict=True):
        assert f"not supported by this installation: it lacks worker.model.{room}" in refusal


def test_every_kind_of_layer_but_the_plain_ones_is_a_room() -> None:
    mixers = {f"mixers.{kind}" for kind in MIXERS if kind != "attention"}
    assert set(LAYERS) == mixers | {f"feed_forward.{kind}" for kind in FEED_FORWARDS if kind != "dense"}

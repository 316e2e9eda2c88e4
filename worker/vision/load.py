"""Loads the tower of a checkpoint, or says why its pictures are not served. Text is served in any case."""

import logging
from pathlib import Path

import torch

from worker.model.checkpoint.checkpoint import UnsupportedModel, read_config
from worker.vision.families import FAMILIES, vision_spec
from worker.vision.vision import Tower
from worker.vision.weights import load_tower

log = logging.getLogger("sluice.load")


def tower_of(folder: Path, text_size: int, dtype: torch.dtype, device: torch.device) -> Tower:
    """Loads the tower of a checkpoint whose config states one.

    text_size: hidden size of the text model. Raises CheckpointError when a tensor of a tower that is served is missing
    or misshaped, or a file is broken.
    """
    config = read_config(folder)
    try:
        spec = vision_spec(folder, config, text_size)
    except UnsupportedModel as error:
        return _without(str(error))
    if spec is None:
        served = ", ".join(sorted(FAMILIES))
        return _without(f"the pictures of {config.get('model_type')!r} are not served; those of {served} are")
    weights = load_tower(folder, spec, dtype, device)
    if weights is None:
        return _without("the checkpoint has no weights of a vision tower")
    log.info("pictures are served: %s", config.get("model_type"))
    return Tower(spec, weights, "")


def _without(reason: str) -> Tower:
    log.warning("text alone is served: %s", reason)
    return Tower(missing=reason)

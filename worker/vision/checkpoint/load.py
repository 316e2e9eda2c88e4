"""Loads the tower of a checkpoint, or logs why pictures are not supported. Text works in any case."""

import logging
from pathlib import Path

import torch

from worker.model.checkpoint.checkpoint import UnsupportedModel, read_config
from worker.vision.checkpoint.families import FAMILIES, vision_spec
from worker.vision.checkpoint.weights import load_tower, tower_bytes
from worker.vision.vision import Tower

log = logging.getLogger("sluice.load")


def tower_of(folder: Path, text_size: int, dtype: torch.dtype, device: torch.device) -> Tower:
    """Loads the tower of a checkpoint whose config states one.

    text_size: hidden size of the text model. Raises CheckpointError if a tensor of a supported tower is missing or
    has a wrong shape, or if a file is broken.
    """
    config = read_config(folder)
    try:
        spec = vision_spec(folder, config, text_size)
    except UnsupportedModel as error:
        return _without(str(error))
    if spec is None:
        if reason := (config.get("vision_config") or {}).get("not_served"):  # set for a tower beside a GGUF file
            return _without(str(reason))
        served = ", ".join(sorted(FAMILIES))
        return _without(f"the pictures of {config.get('model_type')!r} are not served; those of {served} are")
    weights = load_tower(folder, spec, dtype, device)
    if weights is None:
        return _without("the checkpoint has no weights of a vision tower")
    log.info("pictures are served: %s", config.get("model_type"))
    return Tower(spec, weights, "")


def bytes_of_tower(folder: Path, text_size: int, dtype: torch.dtype) -> int:
    """Returns how many bytes tower_of will load; 0 if pictures are not served. Raises the same error as tower_of."""
    try:
        spec = vision_spec(folder, read_config(folder), text_size)
    except UnsupportedModel:  # tower_of says why
        return 0
    return 0 if spec is None else tower_bytes(folder, spec, dtype)


def layers_with_vectors(folder: Path, text_size: int) -> int:
    """Returns how many of the text model's first layers get vectors of pictures added to them (deepstack)."""
    try:
        spec = vision_spec(folder, read_config(folder), text_size)
    except UnsupportedModel:  # tower_of says why
        return 0
    return 0 if spec is None else len(spec.deepstack)


def _without(reason: str) -> Tower:
    log.warning("text alone is served: %s", reason)
    return Tower(missing=reason)

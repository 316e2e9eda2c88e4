"""Finds the layers with a sliding window, and their rotary settings."""

from shared.gguf.config.hyperparameters import Config, Hyperparameters
from shared.gguf.errors import GgufError

SLIDING, FULL = "sliding_attention", "full_attention"


def windows(values: Hyperparameters, config: Config, nth: int, window: int = 0) -> Config:
    """Returns the size of the window, and the layers that have a window.

    nth, window: the default where the file states nothing: all layers except every nth one have this window.
    """
    window, layers = values.integer("attention.sliding_window", window), config["num_hidden_layers"]
    every = values.integer("block_count")  # includes the layers for multi-token prediction
    pattern = values.container.metadata.get(values.key("attention.sliding_window_pattern"), nth)
    slides = (
        list(map(bool, pattern))
        if isinstance(pattern, list)
        else [not pattern or (i + 1) % pattern for i in range(every)]
    )
    if len(slides) not in (layers, every):
        raise GgufError(
            f"{values.container.name}: its pattern of windows has {len(slides)} entries for {layers} layers"
        )
    types = [SLIDING if window and slides[i] else FULL for i in range(layers)]
    return {"sliding_window": window, "layer_types": types}


def unscaled_in_windows(values: Hyperparameters, config: Config) -> Config:
    """Returns rotary settings by kind of layer: layers with a window have no rotary scaling (OLMo 3)."""
    theta = config["rope_theta"]
    local = values.number("rope.freq_base_swa", theta)
    scaled = {"rope_type": "default", "rope_theta": theta, **(config["rope_scaling"] or {})}
    return {
        "rope_parameters": {FULL: scaled, SLIDING: {"rope_type": "default", "rope_theta": local}},
        "rope_scaling": None,
    }

"""The settings of a server with many models."""

from dataclasses import dataclass

from shared.config.declaration import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsConfig:
    """Many models behind one port: which models there are, and how many are loaded at a time."""

    models: str = setting(
        "", "file (TOML, or JSON if its name ends in .json) that describes the models of a server, each of which is "
        "loaded when a request asks for it; instead of --model",
    )  # fmt: skip
    models_dir: str = setting(
        "", "folder: every checkpoint folder and GGUF file below it is a model of the server, by its name, loaded when "
        "a request asks for it; instead of --model",
    )  # fmt: skip
    max_loaded_models: int = setting(
        3, "how many models may be loaded at a time; on a GPU only 1 is possible", unit="models", at_least=1, at_most=64
    )
    memory_gb: float = setting(
        0.0, "memory for all loaded models, weights and K/V pools together; 0: 0.9 of what is free when the server "
        "starts", unit="GiB", at_least=0,
    )  # fmt: skip
    keep_alive: str = setting(
        "5m", "how long a model without requests stays loaded: seconds, or like 90s, 10m, 2h; 0: not at all; -1: until "
        "its memory is needed",
    )  # fmt: skip
    load_wait: float = setting(
        120.0, "how long a request waits for its model to be loaded, before the answer is 503", unit="seconds", above=0
    )

    @property
    def has_table(self) -> bool:
        """Whether a file or a folder names the models."""
        return bool(self.models or self.models_dir)

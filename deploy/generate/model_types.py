"""Writes docs/model-types.md: for each `model_type` that transformers knows, whether it is served, or why not.

    python -m deploy.generate.model_types

What is served comes from the tables that workers read. A reason comes from the settings that transformers' own config
of the type declares. Reading all configs takes half a minute, so this is no part of `python -m deploy.generate.docs`;
a test checks that the page lists every type once, and the served ones as such.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.generate.docs_api import table
from worker.encoder.families import ENCODERS
from worker.models.config import TEXT_MODELS
from worker.models.families import FAMILIES
from worker.vision.families import FAMILIES as TOWERS

PAGE = Path(__file__).parents[2] / "docs" / "model-types.md"
TEXT, TEXT_AND_IMAGES, VECTORS = "text", "text, also with images", "vectors, scores and labels"
NOT_TEXT = "does not generate text by itself: images, video, sound, time series, or a part of another model"


@dataclass(frozen=True, slots=True)
class Known:
    """What transformers says of a model_type. settings: the values of its config by name

    generates: it has a class that generates text, from text or from text and images
    """

    name: str
    settings: Mapping[str, Any]
    generates: bool

    def has(self, *names: str) -> bool:
        """Returns whether the config has one of the settings, with a value other than None, 0, False or empty."""
        return any(self.settings.get(name) for name in names)


# Why a type that generates text is not served: all that apply are named, in this order.
REASONS: Mapping[str, Callable[[Known], bool]] = {
    "an encoder and a decoder": lambda known: known.has("is_encoder_decoder"),
    "multi-head latent attention": lambda known: known.has("kv_lora_rank", "q_lora_rank"),
    "attention that an indexer makes sparse": lambda known: known.has("index_topk"),
    "Mamba layers": lambda known: known.has("mamba_d_state", "state_size", "ssm_state_size", "mamba_state_dim"),
    "recurrent layers": lambda known: known.has("lru_width", "linear_attn_config", "attention_hidden_size"),
    "a grouped router": lambda known: (known.settings.get("n_group") or 0) > 1,
    "its kind of experts": lambda known: known.has(
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"
    ),
    "sound as input": lambda known: known.has("audio_config", "num_mel_bins"),
    "its vision tower": lambda known: known.has("vision_config", "vq_config"),
    "positions that are not rotary": lambda known: (
        not known.has("rope_parameters", "rope_theta", "rotary_dim", "rotary_pct", "text_config", "rope_scaling")
    ),
}
OTHER = "layers of its own, for which there is no row in `worker/models/families.py`"


def known_types() -> Iterator[Known]:
    """Reads the configs of all types that transformers knows; takes half a minute."""
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    generating = {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        *auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    } - {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}  # fmt: skip
    for name in sorted(CONFIG_MAPPING_NAMES):
        reads = name in generating and name not in served()
        yield Known(name, _defaults(CONFIG_MAPPING[name]) if reads else {}, name in generating)


def _defaults(config: Any) -> Mapping[str, Any]:
    """Returns the settings of a config class. Where its defaults contradict each other, only their names: each True."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        found: dict[str, Any] = config().to_dict()
    except StrictDataclassError:
        found = dict.fromkeys(config.__annotations__, True)
    return found


def served() -> dict[str, str]:
    """Returns what each served type generates or computes, by model_type."""
    found = {name: TEXT for name in (*FAMILIES, *TEXT_MODELS)}
    return found | {name: TEXT_AND_IMAGES for name in TOWERS} | {name: VECTORS for name in ENCODERS}


def why_not(known: Known) -> str:
    reasons = [reason for reason, applies in REASONS.items() if applies(known)]
    return ", ".join(reasons) or OTHER


def page(types: Iterator[Known], version: str) -> str:
    """Returns the page. version: of transformers"""
    served_types, refused = served(), defaultdict[str, list[str]](list)
    for known in types:
        if known.name not in served_types:
            refused[why_not(known) if known.generates else NOT_TEXT].append(known.name)
    groups = defaultdict[str, list[str]](list)
    for name, what in served_types.items():
        groups[what].append(name)
    rows = [[what, _listed(names)] for what, names in groups.items()]
    last = refused.pop(NOT_TEXT)
    others = sorted(refused.items(), key=lambda one: -len(one[1]))
    return "\n".join([
        "# Model types", "",
        f"Every `model_type` that transformers {version} knows, and those of Sluice's own. `python -m "
        "deploy.generate.model_types` writes this page.", "",
        "## Served", "", "The text part of a multimodal type has a type of its own.", "",
        table(["what it makes", "`model_type`"], rows), "",
        "## Refused", "",
        "A worker refuses these by name when it starts, with exit code 3. The reasons are read from transformers' "
        "configs: what a type has that Sluice lacks, or for which its family has no row yet.", "",
        table(["why", "`model_type`"], [[reason, _listed(names)] for reason, names in others]), "",
        "## Not for text", "", f"A type here {NOT_TEXT}; encoders of text that are not served are here, too.", "",
        _listed(last), "",
    ])  # fmt: skip


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def main() -> int:
    import transformers

    PAGE.write_text(page(known_types(), transformers.__version__))
    return 0


if __name__ == "__main__":
    sys.exit(main())

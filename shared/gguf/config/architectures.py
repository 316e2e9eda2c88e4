"""The supported architectures. An architecture is a row, with a function for values that only it has in config.json.

The functions are in dense.py, mixtures.py, hybrids.py and gemma4.py. Where GGUF files do not store a value, the row has
the value that llama.cpp builds into the architecture.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.gguf.config import dense, gemma4, hybrids, mixtures
from shared.gguf.config.hyperparameters import Config, Hyperparameters


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type: the name in Hugging Face. extra: returns the values that only this family has in config.json.

    shared: returns the values that most families state once for all layers.
    eps: the name of the norms' epsilon in config.json. layer_norm: whether norms subtract the mean.
    """

    model_type: str
    generator: str
    extra: Callable[[Hyperparameters, Config], Config]
    shared: Callable[[Hyperparameters], Config] = dense.same_in_all_layers
    eps: str = "rms_norm_eps"
    layer_norm: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", mixtures.llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", dense.whole_heads),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", dense.whole_heads),
    "qwen2vl": Architecture("qwen2_5_vl_text", "Qwen2_5_VLForConditionalGeneration", dense.qwen_vl),
    "qwen3vl": Architecture("qwen3_vl_text", "Qwen3VLForConditionalGeneration", dense.qwen_vl),
    "qwen3vlmoe": Architecture("qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", mixtures.qwen3_vl_moe),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", mixtures.qwen2_moe),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", mixtures.qwen3_moe),
    "qwen3next": Architecture("qwen3_next", "Qwen3NextForCausalLM", hybrids.qwen3_next),
    "qwen35": Architecture("qwen3_5_text", "Qwen3_5ForCausalLM", hybrids.qwen3_5),
    "qwen35moe": Architecture("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", hybrids.qwen3_5_moe),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", mixtures.gpt_oss),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", dense.gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", dense.gemma3),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", gemma4.extra, gemma4.sizes),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", dense.phi3),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", dense.smollm3),
    "mistral3": Architecture("mistral", "MistralForCausalLM", dense.mistral3),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", dense.olmo2),
    "olmoe": Architecture("olmoe", "OlmoeForCausalLM", mixtures.olmoe),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", dense.glm4),
    "glm4moe": Architecture("glm4_moe", "Glm4MoeForCausalLM", mixtures.glm4_moe),
    "granite": Architecture("granite", "GraniteForCausalLM", dense.granite),
    "granitemoe": Architecture("granitemoe", "GraniteMoeForCausalLM", mixtures.granite_moe),
    "granitehybrid": Architecture(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", hybrids.granite_hybrid, hybrids.sizes_of_granite
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", dense.ernie4_5),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", dense.exaone4),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", dense.seed_oss),
    "command-r": Architecture("cohere", "CohereForCausalLM", dense.command_r, eps="layer_norm_eps", layer_norm=True),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", dense.cohere2, eps="layer_norm_eps", layer_norm=True),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", dense.starcoder2, eps="norm_epsilon", layer_norm=True
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", dense.hunyuan),
    "apertus": Architecture("apertus", "ApertusForCausalLM", dense.apertus),
    "nemotron": Architecture("nemotron", "NemotronForCausalLM", dense.nemotron, eps="norm_eps", layer_norm=True),
    "arcee": Architecture("arcee", "ArceeForCausalLM", dense.arcee),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", hybrids.lfm2, hybrids.sizes_of_lfm2, eps="norm_eps"),
}

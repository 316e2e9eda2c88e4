"""Tiny random checkpoints with a vision tower, made by transformers, and requests with images on a real runner."""

import json
import random
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers  # imports the code of a family when that is first used
from torch import Tensor

from shared.images import image_digest
from shared.messages import PromptImage, Sampling
from tests.checkpoints import DELTA, EOS, FULL, GEMMA4_SIZES, SLIDING, VOCAB, byte_level_tokenizer
from tests.worker.scheduler.harness import commit
from worker.checkpoint.checkpoint import read_config
from worker.engine.crash_journal import CrashJournal
from worker.kv_cache.pages import PagePool
from worker.kv_cache.tensors import KVCache, cache_groups
from worker.model_runner.runner import Runner
from worker.models.config import spec_from_config
from worker.models.cpu_decoder import fastest_decoder
from worker.models.decoder import Decoder
from worker.models.load import load
from worker.scheduler.policy import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.sequence import Sequence
from worker.vision.spec import VisionSpec
from worker.vision.vision import BetweenSteps, Vision, give
from worker.vision.weights import tower_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CPU = torch.device("cpu")
LONGEST = 512
PLACEHOLDER, ROW_END = 7, 5
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": LONGEST, "initializer_range": 0.3,
    "rms_norm_eps": 1e-5, "eos_token_id": EOS, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TOWER = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 76,
    "patch_size": 4, "hidden_act": "gelu_pytorch_tanh", "initializer_range": 0.2,
}  # fmt: skip
OF_QWEN = {
    "image_token_id": PLACEHOLDER, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4,
    "tie_word_embeddings": False,
}  # fmt: skip


def _idefics3(**changes: Any) -> "PreTrainedModel":
    vision = {**TOWER, "image_size": 72, "patch_size": 6, **changes}  # 12 patches along a side
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, scale_factor=3, image_token_id=PLACEHOLDER,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.Idefics3ForConditionalGeneration(config)


def _smolvlm(**changes: Any) -> "PreTrainedModel":
    vision = {**TOWER, "image_size": 66, "patch_size": 8, **changes}  # 8 patches along a side, and 2 unused pixels
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama"}, vision_config=vision, scale_factor=2, image_token_id=PLACEHOLDER,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.SmolVLMForConditionalGeneration(config)


def _gemma3(**changes: Any) -> "PreTrainedModel":
    vision = {**TOWER, "image_size": 64, "patch_size": 4, "model_type": "siglip_vision_model", **changes}
    text = {
        **TEXT, "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    }  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=16, image_token_index=PLACEHOLDER,
        image_token_id=PLACEHOLDER, boi_token_index=3, eoi_token_index=4,
    )  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config)


def _gemma4(text: dict[str, Any], vision: dict[str, Any]) -> "PreTrainedModel":
    """A model whose attention scores are not scaled, but small enough that rounding errors are not amplified."""
    of_tower = {
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 3, "head_dim": 16, "patch_size": 4, "position_embedding_size": 40,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config={**GEMMA4_SIZES, "max_position_embeddings": LONGEST, "pad_token_id": 2, **text},
        vision_config={**of_tower, **vision}, image_token_id=PLACEHOLDER, video_token_id=6, audio_token_id=5,
    )  # fmt: skip
    model = transformers.Gemma4ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.fill_(0.3)
            if name.endswith("position_embedding_table"):
                weight.normal_(0, 0.5)
        for name, number in model.named_buffers():
            if name.endswith(("put_min", "put_max")):
                number.fill_(1.2 if name.endswith("max") else -1.1)
            if name.endswith(("std_bias", "std_scale")):
                number.uniform_(0.5, 1.5)
    return model


def _gemma4_small(**changes: Any) -> "PreTrainedModel":
    """A model like Gemma 4 E2B: per-layer embeddings, clamped linears in the tower, causal attention in images."""
    text = {
        "num_hidden_layers": 6, "layer_types": [SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL],
        "num_kv_shared_layers": 3, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": VOCAB,
    }  # fmt: skip
    return _gemma4(text, {"use_clipped_linears": True, "pooling_kernel_size": 2, **changes})


def _gemma4_dense(**changes: Any) -> "PreTrainedModel":
    """A model like Gemma 4 31B, whose tokens of an image attend to each other only in layers with a sliding window."""
    text = {
        "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "use_bidirectional_attention": "vision",
    }  # fmt: skip
    return _gemma4(text, {"standardize": True, "pooling_kernel_size": 3, **changes})


def _gemma4_unified(**changes: Any) -> "PreTrainedModel":
    """A model like Gemma 4 12B, which reads images without a tower."""
    sizes = {name: one for name, one in GEMMA4_SIZES.items() if not name.endswith("per_layer_input")}
    text = {
        **sizes, "num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "max_position_embeddings": LONGEST,
        "use_bidirectional_attention": "vision", "pad_token_id": 2,
    }  # fmt: skip
    vision = {
        "patch_size": 4,
        "pooling_kernel_size": 3,
        "mm_embed_dim": 48,
        "output_proj_dims": 48,
        "mm_posemb_size": 9,
    }
    config = transformers.Gemma4UnifiedConfig(
        text_config=text, vision_config={**vision, **changes}, image_token_id=PLACEHOLDER, video_token_id=6,
        audio_token_id=5,
    )  # fmt: skip
    model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("q_norm.weight"):
                weight.fill_(0.3)
    return model


GEMMA4S = ("gemma4_small", "gemma4_dense", "gemma4_unified")


def _qwen3_5(**changes: Any) -> "PreTrainedModel":
    vision = {
        "depth": 3, "hidden_size": 48, "num_heads": 3, "intermediate_size": 80, "patch_size": 4,
        "out_hidden_size": DELTA["hidden_size"],
        "num_position_embeddings": 25, "initializer_range": 0.2, **changes,
    }  # fmt: skip
    rope = {**DELTA["rope_parameters"], "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    text = {**DELTA, "max_position_embeddings": LONGEST, "rope_parameters": rope, "model_type": "qwen3_5_text"}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, **OF_QWEN)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def _qwen3_vl(**changes: Any) -> "PreTrainedModel":
    vision = {
        "depth": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 80, "patch_size": 4, "out_hidden_size": 64,
        "num_position_embeddings": 16, "initializer_range": 0.2, "deepstack_visual_indexes": [0, 2], **changes,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
    text = {**TEXT, "head_dim": 16, "rope_parameters": rope, "model_type": "qwen3_vl_text"}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **OF_QWEN)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _qwen3_vl_moe(**changes: Any) -> "PreTrainedModel":
    dense = _qwen3_vl(**changes).config
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [1]}
    text = {**dense.text_config.to_dict(), **experts, "model_type": "qwen3_vl_moe_text"}
    vision = {**dense.vision_config.to_dict(), "model_type": "qwen3_vl_moe_vision"}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **OF_QWEN)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def _qwen2_5_vl(**changes: Any) -> "PreTrainedModel":
    vision = {
        "depth": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 80, "patch_size": 4, "out_hidden_size": 64,
        "initializer_range": 0.2, "window_size": 18, "fullatt_block_indexes": [1, 3], **changes,  # windows of 2 squares
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
    text = {**TEXT, "rope_parameters": rope, "model_type": "qwen2_5_vl_text"}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **OF_QWEN)
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def _of_pixtral(**changes: Any) -> dict[str, Any]:
    """Returns the config that both models with this tower share. Heads are as wide as their rotary frequencies need."""
    vision = {
        **TOWER, "model_type": "pixtral", "image_size": 64, "hidden_act": "silu", "rope_theta": 100.0, "head_dim": 16,
        **changes,
    }  # fmt: skip
    return {"vision_config": vision, "image_token_index": PLACEHOLDER, "tie_word_embeddings": False}


def _mistral3(**changes: Any) -> "PreTrainedModel":
    text = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None, "rms_norm_eps": 1e-3}
    return transformers.Mistral3ForConditionalGeneration(
        transformers.Mistral3Config(text_config=text, **_of_pixtral(**changes))
    )


def _llava(**changes: Any) -> "PreTrainedModel":
    text = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
    config = transformers.LlavaConfig(
        text_config=text, vision_feature_layer=-1, vision_feature_select_strategy="full", **_of_pixtral(**changes)
    )
    return transformers.LlavaForConditionalGeneration(config)


def _lfm2_vl(**changes: Any) -> "PreTrainedModel":
    """A tower with a grid of 5 x 5 positions, so that some images have more patches than positions, others fewer."""
    vision = {**TOWER, "model_type": "siglip2_vision_model", "num_patches": 25, "vision_use_head": False, **changes}
    text = {
        **TEXT,
        "model_type": "lfm2",
        "layer_types": ["conv", "full_attention", "conv"],
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,  # GGUF files state the final width
    }
    config = transformers.Lfm2VlConfig(
        text_config=text, vision_config=vision, image_token_id=PLACEHOLDER, projector_hidden_size=72,
        downsample_factor=2,
    )  # fmt: skip
    return transformers.Lfm2VlForConditionalGeneration(config)


PIXTRALS = ("mistral3", "llava")
MODELS = {
    "mistral3": _mistral3, "llava": _llava, "lfm2_vl": _lfm2_vl,
    "gemma4_small": _gemma4_small, "gemma4_dense": _gemma4_dense, "gemma4_unified": _gemma4_unified,
    "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl_moe": _qwen3_vl_moe,
    "idefics3": _idefics3, "smolvlm": _smolvlm, "gemma3": _gemma3, "qwen3_5": _qwen3_5, "qwen3_vl": _qwen3_vl,
}  # fmt: skip
SQUARES = [(3, 2), (2, 5), (1, 4)]  # (rows, columns) of tokens, for models whose images may have any size


def build(kind: str, **changes: Any) -> "PreTrainedModel":
    """Returns a float32 model whose norms and biases differ from their initial values."""
    torch.manual_seed(3)
    model = MODELS[kind](**changes).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if kind in GEMMA4S and (name.endswith("norm.weight") or "table" in name):
                parameter.mul_(1 + torch.randn_like(parameter) * 0.2)
            elif "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif (
                "vision" in name or "visual" in name or "connector" in name or "projector" in name
            ) and parameter.ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5)
            if kind == "gemma3" and "language_model" in name and "post_" in name:
                # with small norms, the scaled embedding outweighs the layers, and a tied head repeats a token
                parameter.add_(16.0)
            if kind in GEMMA4S and "language_model" in name and "post_" in name:
                parameter.mul_(8)
            if "connector" in name or "projection" in name:
                parameter.mul_(3)
    return model


def save(kind: str, folder: Path) -> Path:
    build(kind).save_pretrained(folder)
    byte_level_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_mean": MEAN,
                "image_std": STD,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "max_soft_tokens": 12,
            }
        )
    )
    return folder


def image_of(start: int, tokens: int, height: int, width: int, pixels: bytes) -> PromptImage:
    return PromptImage(start, tokens, height, width, pixels, image_digest(height, width, pixels))


def inverted(image: PromptImage) -> PromptImage:
    """Returns a different image for the same placeholder tokens."""
    levels = bytes(255 - level for level in image.pixels)
    return image_of(image.start, image.tokens, image.height, image.width, levels)


def prompt_with(images: int, spec: VisionSpec, seed: int = 0) -> tuple[list[int], list[PromptImage]]:
    """Returns a prompt with text before, between and after images."""
    draw = random.Random(seed)
    prompt: list[int] = []
    found: list[PromptImage] = []
    for index in range(images):
        prompt += [draw.randrange(8, VOCAB) for _ in range(3 + 5 * index)]
        step = spec.patch_size * spec.side
        height, width = (spec.image_size or squares * step for squares in SQUARES[index])
        tokens = spec.tokens_of(height, width)
        found.append(image_of(len(prompt), tokens, height, width, draw.randbytes(3 * height * width)))
        row = [PLACEHOLDER] * spec.squares_of(height, width)[1] + [ROW_END] * spec.row_ends
        prompt += (row * tokens)[:tokens]
    return prompt + [draw.randrange(8, VOCAB) for _ in range(9)], found


def normalized(image: PromptImage) -> Tensor:
    """Returns the pixels [3, height, width], normalized as by an image processor of transformers."""
    raw = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(image.height, image.width, 3)
    levels = (raw.double() / 255).float().permute(2, 0, 1)
    return (levels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@dataclass
class Served:
    """A served checkpoint: its decoder and its vision tower."""

    decoder: Decoder
    vision: Any  # a Vision, or None

    @classmethod
    def of(cls, folder: Path, dtype: torch.dtype = torch.float32, cache_bytes: int = 1 << 26) -> "Served":
        spec = spec_from_config(read_config(folder))
        decoder = Decoder(spec, load(folder, spec, dtype, CPU, invariant=True), LONGEST)
        tower = tower_of(folder, spec.hidden_size, dtype, CPU)
        assert tower.spec is not None and tower.weights is not None, tower.missing
        vision = Vision(tower.spec, tower.weights, decoder.operations, decoder.layers_started, cache_bytes,
            decoder.ropes[0][0].shape[1],
        )  # fmt: skip
        return cls(decoder, vision)


@cache
def served(folder: Path, dtype: torch.dtype = torch.float32) -> Served:
    return Served.of(folder, dtype)


@dataclass
class Asked:
    """A request for greedy or sampled tokens."""

    prompt: list[int]
    images: list[PromptImage] = field(default_factory=list)
    new: int = 12
    seed: int | None = None
    generated: list[int] = field(default_factory=list)  # output that exists already


def sequence_of(index: int, one: Asked, spec: Any, encoded: Any = None) -> Sequence:
    sampling = Sampling(
        one.new, temperature=0.0 if one.seed is None else 0.8, seed=one.seed, ignore_eos=True, logprobs=0,
        logit_bias=((PLACEHOLDER, -100.0),),
    )  # fmt: skip
    sequence = Sequence((b"f", index), one.prompt + one.generated, len(one.prompt), sampling, one.seed or 0)
    if one.images:
        give(sequence, one.images, spec, encoded)
    return sequence


def no_call() -> None: ...


def fail(sequence: Sequence, error: Exception) -> None:
    raise error


@dataclass
class Bench:
    """A scheduler and a runner that answer requests. All calls share one prefix cache."""

    served: Served
    chunk: int = 64
    step_tokens: int = 256
    page: int = 16
    prefix_cache: bool = True
    between_steps: bool = False  # whether images are encoded between steps, piece by piece, instead of in steps
    in_c: bool = True  # whether the loop over the layers runs in C, if the C library is available
    graphs: bool = False  # whether steps are replayed as graphs; then the loop over the layers is Python's, as on GPUs
    scheduler: Scheduler = field(init=False)
    waited: int = 0  # number of pieces of images that were encoded without a step

    def __post_init__(self) -> None:
        decoder = self.served.decoder
        if self.served.vision is not None:
            self.chunk = max(self.chunk, self.served.vision.spec.largest_whole)
        groups, dtype = cache_groups(decoder.spec, LONGEST, paged=True), decoder.weights.embed.dtype
        pages = 1 + 12 * LONGEST // self.page
        kv = KVCache(decoder.spec, [pages] * len(groups), self.page, dtype, CPU, groups, 60, dtype)
        config = SchedulerConfig(
            max_seq_len=LONGEST, eos_token_ids=frozenset({EOS}), max_step_tokens=self.step_tokens,
            prefill_chunk_size=self.chunk, prefix_cache=self.prefix_cache, state_checkpoint_tokens=20,
        )  # fmt: skip
        pools = [PagePool(pages, self.page, group.window) for group in groups]
        self.scheduler = Scheduler(config, pools, PagePool(60, self.page) if kv.states else None)
        model = fastest_decoder(decoder, kv) if self.in_c and not self.graphs else decoder
        self.runner = Runner(model, kv, vision=self.served.vision, graphs=self.graphs, max_step_tokens=self.step_tokens)

    def answers(self, *asked: Asked, preempt_at: tuple[int, ...] = ()) -> list[tuple[list[int], list[float]]]:
        """Returns the ids of each request with their log-probabilities. All requests share one scheduler."""
        scheduler, step = self.scheduler, 0
        vision = self.served.vision
        spec, encoded = (None if vision is None else vision.spec), (vision if self.between_steps else None)
        encode = (
            BetweenSteps(vision, scheduler, 0, CrashJournal().record_step, no_call, no_call, fail) if encoded else None
        )
        sequences = [sequence_of(index, one, spec, encoded) for index, one in enumerate(asked)]
        logprobs: dict[Any, list[float]] = {sequence.key: [] for sequence in sequences}
        for sequence in sequences:
            scheduler.submit(sequence, 0.0)
        while scheduler.has_work:
            plan = scheduler.plan(float(step))
            if encode is not None and encode(plan) and not plan:
                self.waited += 1
                continue
            output = self.runner.step(plan)
            for sequence, message in output.logprobs:
                logprobs[sequence.key] += torch.frombuffer(bytearray(message.chosen), dtype=torch.float32).tolist()
            commit(scheduler, plan, output.ids, float(step))
            step += 1
            if step in preempt_at and sequences[0] in scheduler.state.running:
                scheduler.state.preempt(sequences[0], float(step))
            assert step < 2000
        scheduler.check()
        return [(one.tokens[one.prompt_len :], logprobs[one.key]) for one in sequences]

"""The same model in transformers, in float32 with the dequantized weights, and an independently built tokenizer.

transformers converts the weights of the GGUF file (it undoes the converter's order of rotary dimensions). The tokenizer
is spelled out here as the model's authors publish it, because transformers gives every GGUF file of this kind GPT-2's
rules, which do not split digits.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor, get_gguf_hf_weights_map

HYPERPARAMETERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}
SPECIAL = 3  # the type of a special token in GGUF


@dataclass(frozen=True)
class Gap:
    """The distance in logits of an id from the best id at its position; 0 if it is the best."""

    place: int
    chosen: int
    best: int
    margin: float


@dataclass(frozen=True)
class Scored:
    """The positions where an answer differs from the most likely tokens, and the log-probabilities of its tokens."""

    gaps: list[Gap]
    logprobs: list[float]


class Reference:
    def __init__(self, file: Path) -> None:
        self.file = file

    @cached_property
    def _reader(self) -> GGUFReader:
        return GGUFReader(self.file)

    def _field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    @cached_property
    def model(self) -> Any:
        config = LlamaConfig(
            **{name: self._field(f"llama.{stored}") for name, stored in HYPERPARAMETERS.items()},
            rope_parameters={"rope_type": "default", "rope_theta": self._field("llama.rope.freq_base")},
            tie_word_embeddings=True,
        )
        with no_init_weights():
            model = LlamaForCausalLM(config).float().eval()
        processor = LlamaTensorProcessor(config=config.to_dict())
        names = get_gguf_hf_weights_map(model, processor)
        weights = {}
        for tensor in self._reader.tensors:
            whole = processor.process(dequantize(tensor.data, tensor.tensor_type), tensor.name)
            weights[names[tensor.name]] = torch.from_numpy(whole.weights.copy())
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"} and not unexpected, (missing, unexpected)
        model.tie_weights()
        return model

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        words, kinds, merges, template = (
            self._field(f"tokenizer.{name}")
            for name in ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template")
        )
        plain = Tokenizer(
            models.BPE({word: i for i, word in enumerate(words)}, [tuple(merge.split(" ")) for merge in merges])
        )
        plain.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        plain.decoder = decoders.ByteLevel()
        special = [word for word, kind in zip(words, kinds, strict=True) if kind == SPECIAL]
        plain.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
        return PreTrainedTokenizerFast(
            tokenizer_object=plain, chat_template=template, clean_up_tokenization_spaces=False, eos_token="<|im_end|>"
        )

    def chat_ids(self, messages: list[dict[str, Any]]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    @torch.no_grad()
    def logits(self, ids: list[int], last: int) -> Tensor:
        """Returns the logits [last, V] after each of the last `last` ids, computed in one pass."""
        return torch.as_tensor(self.model(torch.tensor([ids]), logits_to_keep=last).logits[0])

    def score(self, prompt: list[int], answer: list[int]) -> Scored:
        """Scores each token of `answer` with transformers, given all tokens before it."""
        logits = self.logits(prompt + answer[:-1], len(answer))
        best, chosen = logits.argmax(-1), torch.tensor(answer)
        own = logits.gather(1, chosen[:, None])[:, 0]
        margins = logits.max(-1).values - own
        gaps = [
            Gap(place, answer[place], int(best[place]), float(margins[place]))
            for place in (chosen != best).nonzero()[:, 0].tolist()
        ]
        return Scored(gaps, (own - logits.logsumexp(-1)).tolist())

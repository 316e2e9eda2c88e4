"""Trains the demo model: tokenizer, then weights, then a Hugging Face folder.

    python -m deploy.demo.training.train --out deploy/demo/model --steps 2000 --compile

The result depends only on the arguments and the machine, because `corpus` makes the text from --seed.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deploy.demo.training.batches import IGNORED, Batch, batches
from deploy.demo.training.corpus import END_OF_TEXT, IM_END, IM_START, documents

# A message's content is a text, a list of parts with texts, or null.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% elif message['content'] %}"
    "{% for part in message['content'] %}{{ part['text'] }}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOKENIZER_DOCUMENTS = 20_000
WARMUP_STEPS = 40
UNDECIDED = 1 << 30  # number of steps while only the time limit counts; more than any training takes


def train_tokenizer(vocab_size: int, seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (segment.text for row in islice(documents(seed), TOKENIZER_DOCUMENTS) for segment in row)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def model_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (IM_END, END_OF_TEXT)]
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=ends[1],
        eos_token_id=ends,
        pad_token_id=ends[1],
    )


def loss_of(model: LlamaForCausalLM, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(
            batch.tokens,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).logits
    each = cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="none")
    weights = batch.weights.flatten()
    return (each * weights).sum() / weights.sum()


def rate(step: int, total: int, peak: float) -> float:
    """Returns the learning rate: after a short rise it stays at `peak`; in the second half of the steps it falls to 0.

    The plateau does not depend on `total`, so `total` can still be decided during the plateau.
    """
    decay_from = total // 2
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    return peak * (total - step) / (total - decay_from) if step > decay_from else peak


def optimizers(model: LlamaForCausalLM, peak: float) -> list[torch.optim.Optimizer]:
    """Returns Muon for the matrices inside the layers, and AdamW for the embedding and the norms.

    Muon's step is scaled to the size of AdamW's, so that one rate serves both. On this text Muon
    needs less than half of the steps that AdamW needs.
    """
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim < 2)]
    return [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]


@dataclass(frozen=True)
class Plan:
    steps: int
    minutes: float  # if not 0, train for this time instead of a number of steps
    peak: float  # highest learning rate
    compiled: bool


def train(model: LlamaForCausalLM, stream: Iterator[Batch], plan: Plan) -> int:
    """Trains the model and returns the number of steps; `plan.steps` set to this number repeats the training."""
    loss_function = torch.compile(loss_of, dynamic=False) if plan.compiled else loss_of
    active = optimizers(model, plan.peak)
    began = time.monotonic()
    total = UNDECIDED if plan.minutes else plan.steps
    for step, batch in enumerate(stream):
        spent = (time.monotonic() - began) / 60
        if total == UNDECIDED and spent >= plan.minutes / 2:
            total = step * 2
        if step >= total:
            break
        for group in (group for optimizer in active for group in optimizer.param_groups):
            group["lr"] = rate(step, total, plan.peak)
        loss = loss_function(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in active:
            optimizer.step()
        model.zero_grad()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  {spent:5.1f} min", flush=True)
    return total


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes a folder beside `out` and renames it, so that readers of `out` hardly ever see an incomplete model."""
    staging = out.with_name(out.name + ".new")
    shutil.rmtree(staging, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    (staging / "model.safetensors").chmod(0o644)
    normalize_tokenizer_config(staging / "tokenizer_config.json")
    (staging / "chat_template.jinja").unlink(missing_ok=True)
    shutil.rmtree(out, ignore_errors=True)
    staging.rename(out)


def normalize_tokenizer_config(path: Path) -> None:
    """Puts the chat template into tokenizer_config.json, and removes traces of the tokenizer's source."""
    content: dict[str, Any] = json.loads(path.read_text())
    kept = {key: value for key, value in content.items() if key not in ("is_local", "local_files_only")}
    kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    path.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model of Sluice.")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; it is replaced")
    parser.add_argument("--init", type=Path, help="go on from the checkpoint in this folder")
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps")
    parser.add_argument("--minutes", type=float, default=0.0, help="choose --steps by the clock")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--compile", action="store_true", help="nearly twice as fast; needs a C++ compiler")
    parser.add_argument("--vocab", type=int, default=1792, help="size of the vocabulary")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    if args.init:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.init)
        model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(args.vocab, args.seed)
        model = LlamaForCausalLM(model_config(tokenizer))
    stream = batches(tokenizer.backend_tokenizer, args.seed)
    steps = train(model, stream, Plan(args.steps, args.minutes, args.rate, args.compile))
    save(model, tokenizer, args.out)
    print(f"trained for {steps} steps; repeat with --steps {steps}")


if __name__ == "__main__":
    main()

"""Trains the MTP head of a demo model, and adds it to the model's checkpoint. The model itself stays as it is.

    python -m deploy.demo.training.train_head --model deploy/demo/model --steps 300

The head learns the model's distributions over the training text, and not the text itself, because a draft is accepted
if the model would choose the same token. The result depends only on the arguments and the machine.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from deploy.demo.training.batches import Batch, batches
from deploy.demo.training.head import Head
from deploy.demo.training.train import rate

PASS_WEIGHTS = (1.0, 0.7, 0.5)  # weights of the losses of the first, second and third draft
WEIGHTS, PREFIX = "model.safetensors", "mtp."


def head_loss(head: Head, model: LlamaForCausalLM, batch: Batch) -> Tensor:
    """Returns the cross-entropy of the head's and the model's distributions, over the tokens that the model writes.

    model: the model in bfloat16, as it is served.
    """
    with torch.no_grad():
        hidden = model.model(
            batch.tokens, attention_mask=batch.mask, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
        following = _next(model.model.embed_tokens(batch.tokens))
        rotary = model.model.rotary_emb(hidden, batch.positions)
    written = pad(batch.weights, (-1, 1)) == 1  # whether the model has learnt to write the token after the next one
    losses = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for at, output in enumerate(head.passes(hidden, following, rotary, batch.mask, len(PASS_WEIGHTS))):
            chosen = written & (batch.positions >= at)
            with torch.no_grad():
                target = model.lm_head(_next(hidden)[chosen]).float().softmax(-1)  # [N, V]
            logits = model.lm_head(output[chosen]).float()
            losses.append(PASS_WEIGHTS[at] * cross_entropy(logits, target))
    return torch.stack(losses).sum()


def _next(values: Tensor) -> Tensor:
    """Shifts [B, L, N] by one, so that each token gets the values of the next token; the last token gets 0."""
    return pad(values, (0, 0, -1, 1))


def train_head(head: Head, model: LlamaForCausalLM, stream: Iterator[Batch], steps: int, peak: float) -> None:
    """Trains the head. peak: the learning rate between the rise and the fall."""
    model.requires_grad_(False)
    matrices, others = ([p for p in head.parameters() if (p.ndim == 2) == two] for two in (True, False))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=peak, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=peak, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    began = time.monotonic()
    for step, batch in enumerate(islice(stream, steps)):
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = rate(step, steps, peak)
        loss = head_loss(head, model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        head.zero_grad()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  {(time.monotonic() - began) / 60:5.1f} min", flush=True)


def add_head(head: Head, folder: Path) -> None:
    """Adds the head to a checkpoint, in bfloat16. It replaces an existing head."""
    path = folder / WEIGHTS
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(PREFIX)}
    own = {PREFIX + name: tensor.detach().bfloat16() for name, tensor in head.state_dict().items()}
    staging = path.with_suffix(".new")
    save_file(tensors | own, staging, metadata={"format": "pt"})
    staging.chmod(0o644)
    staging.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the MTP head of the demo model of Sluice.")
    parser.add_argument("--model", type=Path, required=True, help="the folder of the model; its weights get a head")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    # No code reads uninitialized memory, and filling it would take a fifth of the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    head = Head(model.config)
    train_head(head, model, batches(tokenizer.backend_tokenizer, args.seed), args.steps, args.rate)
    add_head(head, args.model)


if __name__ == "__main__":
    main()

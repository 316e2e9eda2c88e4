"""Decides which models keep keys in int8 without their centre, and computes it.

A key is the rotary embedding of a projection and its bias. Some biases are 40 times as long as the rest of a key
(Qwen2.5), and a step of int8 follows the largest element. So the mean over positions of the rotated bias, the centre of
a head's keys, is subtracted from each of them before it is rounded.

Attention needs not know of it: one vector c less in all keys of a head is one number q · c less in all scores of a
query q, and softmax sees only differences of scores. So any centre is right, up to rounding; it is merely more or less
useful. Kinds of rotary embeddings (partial, interleaved, YaRN, M-RoPE), adapters of the projection and the positions of
a text decide only that.
"""

import torch
from torch import Tensor

from worker.spec import ModelSpec

# The mean is over this many positions, whatever the length of the context is, so that the centre depends on the
# checkpoint alone. A mean over more positions loses what pairs that rotate slowly have in common in short texts.
POSITIONS = 8192


def centred_over(spec: ModelSpec) -> int:
    """Returns the number of positions over which centres are means; 0 if the model's keys have no centre.

    Keys have none
    - if scores are compared with more than other scores: with the logits of sinks (gpt-oss), or by the function that
      caps them (Gemma 2);
    - if the norm of keys makes something else of the bias (Qwen3, Gemma 3), or there is no bias (Llama);
    - if the rows of keys are the values, too (latent attention).
    """
    shifted_is_same = not spec.sinks and spec.attention_softcap == 0.0
    return POSITIONS if shifted_is_same and spec.qkv_bias and not spec.qk_norm and spec.latent is None else 0


def key_centre(bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns the mean of the rotated bias, [Hk, D]. bias [Hk, D]; cos, sin [positions, D]: rotary tables; float32"""
    low, high = bias.double().chunk(2, dim=-1)
    (cos_low, cos_high), (sin_low, sin_high) = (table.double().mean(0).chunk(2) for table in (cos, sin))
    return torch.cat((low * cos_low - high * sin_low, high * cos_high + low * sin_high), dim=-1).float()

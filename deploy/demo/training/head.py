"""The MTP head of the demo model: one Llama layer that predicts the token after the next one (docs/drafts.md).

A row of the head reads the hidden state of a token and the embedding of the next token. For further drafts, the head
reads its own outputs in place of hidden states, so `Head.passes` trains it on its own outputs, too. In pass n, every
row computes its n-th draft, and attends to the rows that the K/V cache would hold at that moment.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

Rotary = tuple[Tensor, Tensor]  # cosines and sines, both [B, L, head_dim]


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj, self.o_proj = nn.Linear(hidden, queries, bias=False), nn.Linear(queries, hidden, bias=False)
        self.k_proj, self.v_proj = nn.Linear(hidden, keys, bias=False), nn.Linear(hidden, keys, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, cached: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
        """Returns the output [B, L, H]. cached: K/V of earlier passes, to which this pass appends its K/V.

        mask: [B, 1, L, N * L] for N passes, true where attention is allowed.
        """
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for proj in self._qkv())
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        cached.append((k, v))
        keys, values = (torch.cat(each, dim=2) for each in zip(*cached, strict=True))
        output = scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
        projected: Tensor = self.o_proj(output.transpose(1, 2).flatten(2))
        return projected

    def _qkv(self) -> tuple[nn.Linear, ...]:
        return self.q_proj, self.k_proj, self.v_proj


class Mlp(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = _norm(config), _norm(config)
        self.self_attn, self.mlp = Attention(config), Mlp(config)

    def forward(self, x: Tensor, rotary: Rotary, cached: list[tuple[Tensor, Tensor]], mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, cached, mask)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


class Head(nn.Module):
    """The head. Its parameters have the names of the tensors in the checkpoint, after the prefix `mtp.`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (_norm(config) for _ in range(3))
        self.layers = nn.ModuleList([Layer(config)])

    def passes(self, hidden: Tensor, following: Tensor, rotary: Rotary, mask: Tensor, count: int) -> Iterator[Tensor]:
        """Yields the outputs [B, L, H] of `count` passes. Pass n gives the logits of the n-th draft of each token.

        hidden: the hidden states of the tokens [B, L, H], after the last norm. following: the embeddings of the next
        tokens [B, L, H]. mask: [B, 1, L, L], true where a token attends to another token.
        """
        embedded, cached = self.pre_fc_norm_embedding(following), list[tuple[Tensor, Tensor]]()
        for n in range(count):
            x = self.fc(torch.cat((embedded, self.pre_fc_norm_hidden(hidden)), dim=-1))
            output: Tensor = self.norm(self.layers[0](x, rotary, cached, _mask(mask, n)))
            yield output
            hidden = pad(output, (0, 0, 1, -1))  # shifts by one: the next token's row reads this output


def _mask(mask: Tensor, before: int) -> Tensor:
    """Returns the attention mask [B, 1, L, N * L] of a pass over the rows of all passes.

    before: number of earlier passes.
    A row of this pass is a draft. The row attends to its earlier drafts, which are one row of each pass after the
    first, and to the text before these drafts, which is in rows of the first pass.
    """
    drafts = [mask.tril(-behind).triu(-behind) for behind in range(before - 1, -1, -1)]
    return torch.cat([mask.tril(-before), *drafts], dim=-1)


def _norm(config: LlamaConfig) -> LlamaRMSNorm:
    return LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

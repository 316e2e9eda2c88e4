"""A sequence whose tokens are drawn by a chain of samplers (worker/run/sampler_chain.py applies it).

The chain's result is a row of logits to draw from plainly. So `Sequence.sampling` is then plain, and this record has
what the request asks for. Mirostat's bound depends on all tokens so far and their probabilities: if there is output
already, it is computed again from the first token on, with the ids that are known.
"""

from dataclasses import dataclass, field

import msgspec

from shared.messages import SamplerChain, Sampling
from worker.schedule.records.adjustment import adjustment
from worker.schedule.sequence import Sequence


@dataclass(slots=True, eq=False)
class ChainRecord:
    """How the tokens of a sequence are drawn, and the state of Mirostat.

    forced: the ids that the output begins with, whatever is drawn
    """

    sampling: Sampling
    chain: SamplerChain
    forced: list[int]
    mus: list[float] = field(default_factory=list)  # Mirostat's bound for each output token
    last: dict[int, float] = field(default_factory=dict)  # the probabilities that the latest row drew from, by id


def draw_by_chain(sequence: Sequence) -> None:
    """Gives a new sequence, whose sampling has a chain, its record."""
    sampling, chain = sequence.sampling, sequence.sampling.chain
    assert chain is not None
    record = ChainRecord(sampling, chain, [])
    if chain.mirostat:
        record.mus = [2 * chain.mirostat_tau]
        record.forced = sequence.tokens[sequence.prompt_len :]
        del sequence.tokens[sequence.prompt_len :]
        if record.forced and sequence.check is None:
            from worker.schedule.records.replay import MOST_REPLAYED, Replay

            # with log-probabilities, whose messages are for one token each, a token is replayed at a time
            most = MOST_REPLAYED if sampling.logprobs is None else 0
            sequence.check = Replay(record.forced, most, sequence)
    sequence.chain = record
    sequence.sampling = msgspec.structs.replace(
        sampling, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, logit_bias=(), chain=None,
    )  # fmt: skip
    sequence.adjustment = adjustment(sequence.sampling, sequence.prompt_len)

"""Collects the contents of the Step message of one loop iteration for one frontend."""

from dataclasses import dataclass, field

from shared import messages as m
from shared.wire.codec import pack_u32


@dataclass(slots=True)
class StepBuilder:
    ids: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    admitted: list[m.Admitted] = field(default_factory=list)
    rejected: list[m.Rejected] = field(default_factory=list)
    ends: list[m.End] = field(default_factory=list)
    logprobs: list[m.Logprobs] = field(default_factory=list)
    started: list[m.Started] = field(default_factory=list)
    repaired: set[int] = field(default_factory=set)  # requests resynced in this iteration; once is enough
    unknown: list[int] = field(default_factory=list)
    pooled: list[m.Pooled] = field(default_factory=list)

    def add(self, id: int, start: int, tokens: list[int]) -> None:
        """Adds output tokens of request `id`. start: the index of the first one in the output."""
        self.ids.append(id)
        self.starts.append(start)
        self.counts.append(len(tokens))
        self.tokens += tokens

    def build(self) -> m.Step:
        """Builds the message. The server fills in the epoch and the sequence number."""
        return m.Step(
            epoch=0,
            seq=0,
            ids=pack_u32(self.ids),
            starts=pack_u32(self.starts),
            counts=pack_u32(self.counts),
            tokens=pack_u32(self.tokens),
            admitted=tuple(self.admitted),
            rejected=tuple(self.rejected),
            ends=tuple(self.ends),
            logprobs=tuple(self.logprobs),
            started=tuple(self.started),
            unknown=tuple(self.unknown),
            pooled=tuple(self.pooled),
        )

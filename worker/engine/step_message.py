"""Collects the results of one loop iteration for one frontend: the contents of a Step message, rarely of several."""

from dataclasses import dataclass, field

from shared import messages as m
from shared.wire import pack_u32

MAX_LOGPROB_BYTES = 16 << 20  # for a message, unless one request alone has more; a quarter of a message's limit


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
    repaired: set[int] = field(default_factory=set)  # requests whose output was already sent again in this iteration
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

    def parts(self) -> "list[StepBuilder]":
        """Returns a builder for each message to send, in order.

        There is one message, unless the log-probabilities are too long for it. Then a request's tokens and
        log-probabilities stay in the same message, so that if a message is lost, both are missing and are repaired.
        """
        if sum(map(_size, self.logprobs)) <= MAX_LOGPROB_BYTES:
            return [self]
        head = StepBuilder(admitted=self.admitted, rejected=self.rejected, started=self.started)
        tail = StepBuilder(ends=self.ends, unknown=self.unknown, pooled=self.pooled)
        groups, part_of = _grouped(self.logprobs)
        at = 0
        for id, start, count in zip(self.ids, self.starts, self.counts, strict=True):
            part_of.get(id, tail).add(id, start, self.tokens[at : at + count])
            at += count
        return [head, *groups, tail]


def _grouped(logprobs: list[m.Logprobs]) -> tuple[list[StepBuilder], dict[int, StepBuilder]]:
    """Distributes log-probabilities over builders. Returns the builders, and a map from request id to builder."""
    of_request: dict[int, list[m.Logprobs]] = {}
    for one in logprobs:
        of_request.setdefault(one.id, []).append(one)
    groups: list[StepBuilder] = []
    part_of: dict[int, StepBuilder] = {}
    room = 0
    for id, own in of_request.items():
        size = sum(map(_size, own))
        if size > room:
            groups.append(StepBuilder())
            room = MAX_LOGPROB_BYTES
        room -= size
        groups[-1].logprobs += own
        part_of[id] = groups[-1]
    return groups, part_of


def _size(logprobs: m.Logprobs) -> int:
    return len(logprobs.chosen) + len(logprobs.top_ids) + len(logprobs.top_logprobs)

"""A model with scripted outputs behind the real app; each output arrives in small pieces."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frontend.model_context import ModelContext
from frontend.output_parser.model_format import ModelFormat
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared import messages as m
from tests.fakes import MODEL, FakePool, context, sending
from tests.frontend.serving import app_over, serving
from tests.frontend.text.tokenizers import byte_level, save


def tokenizer_with(folder: Path, template: str, specials: Iterable[str] = ()) -> Tokenizer:
    engine = byte_level()
    engine.add_special_tokens(list(specials))
    return Tokenizer.load(save(engine, folder, tokenizer_config={"chat_template": template}))


def context_of(tokenizer: Tokenizer, **more: Any) -> ModelContext:
    return context(tokenizer, max_seq_len=8192, style=ModelFormat.of(tokenizer.templates), **more)


@dataclass
class Model:
    """A fake model.

    says: its next outputs, one per sequence
    prompts: the prompts that it has received
    """

    tokenizer: Tokenizer
    says: list[str] = field(default_factory=list)
    size: int = 3  # tokens that arrive together
    outcome: m.Outcome = m.Outcome.EOS
    pool: FakePool = field(init=False)

    def __post_init__(self) -> None:
        limits = m.Limits(max_seq_len=8192, vocab_size=self.tokenizer.vocab_size, eos_token_ids=(265,))
        self.pool = FakePool(self._play, welcome=m.Welcome(1, 1, 4711, MODEL, "", limits))

    def _play(self, pool: FakePool, stream: Stream) -> None:
        (ids,) = self.tokenizer.encode_now([self.says.pop(0)], False)
        if stream.submit.sampling.logprobs is not None:
            pool.send_logprobs(stream, 0, [-0.5] * len(ids), k=stream.submit.sampling.logprobs)
        sending(*[ids[i : i + self.size] for i in range(0, len(ids), self.size)], outcome=self.outcome)(pool, stream)

    @property
    def prompts(self) -> list[str]:
        return [self.tokenizer.decode(one.prompt, skip_special=False) for one in self.pool.submitted]

    @property
    def grammars(self) -> list[str]:
        return [one.sampling.grammar for one in self.pool.submitted]

    @asynccontextmanager
    async def served(self, **config: Any) -> AsyncIterator[str]:
        async with serving(app_over(self.pool, self.tokenizer, **config)) as url:
            yield url

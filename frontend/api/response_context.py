"""Everything besides the deltas that is needed to write a response. Knows no API format."""

import secrets
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import count

from frontend.request import Delta, GenerationRequest
from frontend.text.tokenizer import Tokenizer
from shared.signing import Signer

AsyncDeltas = AsyncIterator[list[Delta]]  # each list holds all deltas that arrived since the previous list


@dataclass(frozen=True, slots=True)
class ResponseContext:
    """Everything besides the deltas that is needed to write a response."""

    request: GenerationRequest
    tokenizer: Tokenizer
    prefix: str = "cmpl"
    fingerprint: str = ""  # the server's fingerprint (shared/fingerprint.py); empty if the workers report none
    route: str = ""  # the path of the request
    signer: Signer | None = None  # signs receipts
    nonce: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))
    event_numbers: Iterator[int] = field(default_factory=count)  # for API formats that number their events

    @property
    def id(self) -> str:
        return f"{self.prefix}-{self.nonce}"

    @property
    def system_fingerprint(self) -> str | None:
        """The fingerprint as OpenAI's formats state it; None (in JSON null) if it is empty."""
        return self.fingerprint or None

    def token_text(self, id: int) -> str:
        """Returns the text that stands for a token in log-probabilities."""
        return f"token_id:{id}" if self.request.shown.tokens_as_ids else self.tokenizer.token_text(id)

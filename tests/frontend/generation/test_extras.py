"""The extras of a request; a request that asks for no feature has no extras."""

from frontend.generation.extras import extras_of
from frontend.request import Features, GenerationRequest, ResponseOptions, Scored, Telemetry
from frontend.text.detokenizer import OutputText
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.frontend.generation.harness import generation_request


def test_extras_of_a_request_are_those_that_it_asks_for_in_their_order(tokenizer: Tokenizer) -> None:
    def names(request: GenerationRequest) -> list[str]:
        made = extras_of(request, 0, text(), text)
        return [getattr(one, "__qualname__", type(one).__name__) for one in made]

    def text() -> OutputText:
        return OutputText(tokenizer.detokenizer())

    assert names(generation_request()) == []
    every = Features(continued=(5,), echo=("a",), prompt_logprobs=0, output_ms=1, receipt=True, scored=Scored((0,)))
    shown = ResponseOptions(telemetry=Telemetry(True, True))
    request = generation_request(features=every, sampling=Sampling(9, logprobs=0), shown=shown)
    assert names(request) == ["Continued", "TimeLimit", "TokenScores.add", "Echo", "Progress", "_output", "_scores"]

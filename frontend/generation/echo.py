"""Puts the prompt before the output (`echo` of completions), with its log-probabilities if they are requested."""

from frontend.generation.choice import Choice
from frontend.generation.token_scores import TokenScores
from frontend.request import Delta, GenerationRequest
from frontend.text.detokenizer import OutputText


class Echo:
    """Puts the prompt, as the client wrote it, before the first delta of a choice."""

    def __init__(self, request: GenerationRequest, index: int, text: OutputText, scores: TokenScores | None) -> None:
        """text: decodes the prompt's tokens; scores: the log-probabilities of the choice, if requested"""
        prompt = index // request.n
        self._ids, self._texts, _ = text.finish(request.prompts[prompt])
        exact = request.features.echo[prompt]
        if exact and "".join(self._texts) != exact:  # decoding the ids does not give the client's text
            self._texts = [exact, *[""] * (len(self._ids) - 1)]
        self._scores, self._top = scores, request.sampling.logprobs
        self._told = False

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if self._told:
            return
        self._told = True
        if self._scores is not None and delta.logprobs is not None:
            delta.logprobs = self._scores.of_prompt(self._ids, self._top).followed_by([*delta.logprobs])
        delta.ids, delta.texts = self._ids + delta.ids, self._texts + delta.texts

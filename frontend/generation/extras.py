"""The extras of a choice: functions that change its deltas for the optional features of a request.

Only this module knows which module implements a feature. It imports a feature's module when the first request asks for
it. A request without optional features has no extras.
"""

from collections.abc import Callable

from frontend.generation.choice import Extra
from frontend.request import GenerationRequest
from frontend.text.detokenizer import OutputText


def extras_of(
    request: GenerationRequest, index: int, text: OutputText, new_text: Callable[[], OutputText]
) -> list[Extra]:
    """Returns the extras of choice `index`, in the order in which they change a delta.

    text: the detokenizer of the choice, before its first token
    new_text: makes a detokenizer for the prompt, which finds no stop strings and shows no special tokens
    """
    features, sampling, extras = request.features, request.sampling, list[Extra]()
    if features.continued:
        from frontend.generation.continued import Continued

        extras.append(Continued(features.continued, text))
    if features.indent:
        from frontend.generation.indentation import Indentation

        extras.append(Indentation(features.indent, text))
    if features.output_ms:
        from frontend.generation.time_limit import TimeLimit

        extras.append(TimeLimit(features.output_ms))
    if sampling.logprobs is not None or features.prompt_logprobs is not None:
        from frontend.generation.token_scores import TokenScores

        scores = TokenScores(request)
        extras.append(scores.add)
    else:
        scores = None
    if features.echo:
        from frontend.generation.echo import Echo

        extras.append(Echo(request, index, new_text(), scores))
    if request.shown.telemetry or request.shown.continuous_usage:
        from frontend.generation.progress import Progress

        extras.append(Progress(request.shown))
    if features.receipt or features.pooling or features.scored or features.predicted is not None:
        from frontend.generation.endings import endings

        extras += endings(features)
    return extras

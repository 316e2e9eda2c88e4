"""What the features of a request add to a choice: the only place that knows which module does it.

A feature's module is imported when the first request asks for it; a request without features has no extras.
"""

from collections.abc import Callable

from frontend.generation.choice import Extra
from frontend.request import GenerationRequest
from frontend.text.detokenizer import OutputText


def extras_of(
    request: GenerationRequest, index: int, text: OutputText, new_text: Callable[[], OutputText]
) -> list[Extra]:
    """Returns the extras of choice `index`, in the order in which a delta goes through them.

    text: of the choice, which has nothing pushed yet
    new_text: makes one that neither finds stop strings nor shows special tokens, for the prompt
    """
    features, sampling, extras = request.features, request.sampling, list[Extra]()
    if features.continued:
        from frontend.generation.continued import Continued

        extras.append(Continued(features.continued, text))
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

"""Routes that count the tokens of a request in OpenAI's Responses and in Anthropic's format, without a worker."""

from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_request import MessageCountRequest
from frontend.api.openai import responses
from frontend.api.openai.responses_request import ResponseCountRequest
from frontend.routes.tokenize import answering

of_response = answering(ResponseCountRequest, responses.count_tokens)
of_messages = answering(MessageCountRequest, messages.count_tokens)

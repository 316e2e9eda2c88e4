"""Tool calls and reasoning as models write them, and the official SDKs as clients."""

import anthropic
import openai

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{WEATHER}\n{NOW}"
LLAMAS = '{"name": "get_weather", "parameters": {"city": "Paris"}}'


def openai_sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def anthropic_sdk(url: str) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)

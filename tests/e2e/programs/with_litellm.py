"""litellm: OpenAI's three endpoints and Anthropic's, by their own names and through its bridges."""

import sys

import litellm

url, name = sys.argv[1:]
gpt = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "none"}
messages_api = {"model": f"anthropic/{name}", "api_base": url, "api_key": "none"}
messages = [{"role": "user", "content": "import os"}]
city = {"city": {"const": "Lund"}}
schema = {"type": "object", "properties": city, "required": ["city"], "additionalProperties": False}
tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
forced = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "weather"}}}

for one in (gpt, messages_api):
    asked = {**one, "messages": messages, "max_tokens": 24, "temperature": 0}
    whole = litellm.completion(**asked).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(**asked, stream=True)]
    assert "".join(parts) == whole != "", (whole, parts)
    (call,) = litellm.completion(**{**asked, "max_tokens": 64}, **forced).choices[0].message.tool_calls
    assert '"Lund"' in call.function.arguments
text = litellm.text_completion(model=f"text-completion-openai/{name}", api_base=gpt["api_base"], api_key="none",
                               prompt="import os", max_tokens=8)  # fmt: skip
assert text.choices[0].text
for one in (gpt, messages_api):  # Anthropic's by the bridge from Responses
    found = litellm.responses(**one, input="import os", max_output_tokens=24)
    assert found.output[-1].content[0].text
kinds = [event.type for event in litellm.responses(**gpt, input="import os", max_output_tokens=24, stream=True)]
assert kinds[-1] in ("response.completed", "response.incomplete"), kinds

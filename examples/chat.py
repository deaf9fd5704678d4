"""Ask a running cluster (`make run`) by OpenAI's and Anthropic's Python SDK: text as it is written, JSON of a schema.

python examples/chat.py [URL]        needs: pip install openai anthropic
"""

import json
import sys

from anthropic import Anthropic
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "lines": {"type": "integer", "minimum": 1, "maximum": 999},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
}

with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
    model = client.models.list().data[0].id
    question = [{"role": "user", "content": "import os"}]
    for chunk in client.chat.completions.create(model=model, messages=question, max_tokens=24, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    form = {"type": "json_schema", "json_schema": {"name": "module", "schema": SCHEMA}}
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=64, response_format=form)
    print(json.loads(answer.choices[0].message.content))

with Anthropic(base_url=url, api_key="none") as client:
    with client.messages.stream(model=model, messages=question, max_tokens=24) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
    print()

    tool = {"name": "describe", "input_schema": SCHEMA}
    message = client.messages.create(
        model=model, messages=question, max_tokens=64, tools=[tool], tool_choice={"type": "tool", "name": "describe"}
    )
    print(message.stop_reason, message.content[0].input)

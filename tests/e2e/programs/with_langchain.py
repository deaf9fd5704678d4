"""langchain-openai: chats, Responses and completions; tools, forms and streams."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
options = {"model": name, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}


class Town(BaseModel):
    city: Literal["Lund"]


@tool
def weather(city: Literal["Lund"]) -> str:
    """Tell today's weather."""
    return "cold"


for responses in (False, True):
    chat = ChatOpenAI(**options, max_tokens=24, use_responses_api=responses)
    whole = chat.invoke("import os")
    parts = list(chat.stream("import os"))
    assert "".join(part.text for part in parts) == whole.text != ""
    assert whole.usage_metadata["output_tokens"] > 0
    for method in ("json_schema", "function_calling"):
        formed = ChatOpenAI(**options, use_responses_api=responses).with_structured_output(
            Town, method=method, strict=True
        )
        assert formed.invoke("Where?") == Town(city="Lund"), method
    caller = ChatOpenAI(**options, use_responses_api=responses).bind_tools(
        [weather], tool_choice="weather", strict=True
    )
    called = caller.invoke("Go")
    assert [call["args"] for call in called.tool_calls] == [{"city": "Lund"}]
    result = weather.invoke(called.tool_calls[0])
    assert chat.invoke([("user", "Go"), called, result]).text
complete = OpenAI(**options, max_tokens=16)
assert "".join(complete.stream("import os")) == complete.invoke("import os") != ""
assert len(complete.generate(["a", "b"]).generations) == 2

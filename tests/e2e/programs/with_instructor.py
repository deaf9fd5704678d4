"""instructor: objects, whole and partial, from OpenAI's clients and Anthropic's."""

import sys
from typing import Literal

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

url, name = sys.argv[1:]


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Ada"]
    city: Literal["Lund"]


ada = {"name": "Ada", "city": "Lund"}
asked = {"model": name, "messages": [{"role": "user", "content": "Who?"}], "response_model": Person, "max_retries": 0}
gpt = OpenAI(base_url=f"{url}/v1", api_key="none")
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(gpt, mode=mode)
    assert client.create(**asked).model_dump() == ada
    *_, last = client.create_partial(**asked)
    assert last.model_dump() == ada
client = instructor.from_anthropic(Anthropic(base_url=url, api_key="none"))
assert client.create(**asked, max_tokens=64).model_dump() == ada

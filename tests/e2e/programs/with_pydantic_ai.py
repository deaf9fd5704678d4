"""pydantic-ai: agents whose answers have a form, or none, by chat and Responses, whole and streamed."""

import asyncio
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:]


class Village(BaseModel):
    city: Literal["Lund"]


async def main() -> None:
    gpt = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for model in (OpenAIChatModel(name, provider=gpt), OpenAIResponsesModel(name, provider=gpt)):
        plain = Agent(model, instructions="Be brief.", model_settings={"max_tokens": 24, "temperature": 0})
        whole = await plain.run("import os")
        async with plain.run_stream("import os") as stream:
            assert await stream.get_output() == whole.output != "", model
        assert whole.usage.output_tokens > 0
        formed = Agent(model, output_type=Village)
        assert (await formed.run("Where?")).output == Village(city="Lund")
        async with formed.run_stream("Where?") as stream:
            assert await stream.get_output() == Village(city="Lund")


asyncio.run(main())

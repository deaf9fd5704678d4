"""openai-agents: a tool is run once, an answer has its form, whole and streamed, by Responses and by chat."""

import asyncio
import sys
from typing import Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled as disable_tracing
from openai import AsyncOpenAI
from pydantic import BaseModel

url, name = sys.argv[1:]
asked = []


class Whereabouts(BaseModel):
    city: Literal["Lund"]


@function_tool
def weather(city: Literal["Lund"]) -> str:
    """Tell today's weather."""
    asked.append(city)
    return "cold"


async def main() -> None:
    disable_tracing(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(name, client)
        settings = ModelSettings(tool_choice="weather", temperature=0)
        agent = Agent(
            "helper",
            instructions="Be brief.",
            model=model,
            tools=[weather],
            model_settings=settings,
            output_type=Whereabouts,
        )
        asked.clear()
        done = await Runner.run(agent, "What is the weather?")
        assert (asked, done.final_output) == (["Lund"], Whereabouts(city="Lund"))
        streamed = Runner.run_streamed(agent, "What is the weather?")
        kinds = {event.type async for event in streamed.stream_events()}
        assert kinds >= {"raw_response_event", "run_item_stream_event"}, kinds
        assert (asked, streamed.final_output) == (["Lund", "Lund"], done.final_output)


asyncio.run(main())

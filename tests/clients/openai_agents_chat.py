"""openai-agents with its chat model: text, a stream, a turn with a tool, an output type."""

import asyncio
from typing import Annotated, Literal

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from common import QUESTION, main
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

set_tracing_disabled(True)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


def run(server, question, stream=False, temperature=0.0, seed=1, **more):
    """The result of an agent's run. Each has a client of its own, as it has a loop of its own."""

    async def asked():
        async with AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0) as client:
            settings = ModelSettings(temperature=temperature, max_tokens=300, extra_body={"seed": seed})
            agent = Agent(
                name="helper",
                instructions="Be brief.",
                model=OpenAIChatCompletionsModel(server.model, openai_client=client),
                model_settings=settings,
                **more,
            )
            if not stream:
                return await Runner.run(agent, question, max_turns=4)
            result = Runner.run_streamed(agent, question, max_turns=4)
            async for _ in result.stream_events():
                pass
            return result

    return asyncio.run(asked())


def case_text(server):
    whole = run(server, "Tell me a story.").final_output
    assert whole and run(server, "Tell me a story.", stream=True).final_output == whole


def case_a_turn_with_a_tool(server):
    for stream in (False, True):
        asked = []

        @function_tool(strict_mode=True)
        def get_weather(city: str) -> str:
            """Get the current weather in a city."""
            asked.append(city)
            return "21 degrees"

        result = run(server, QUESTION, stream=stream, tools=[get_weather])
        assert asked and result.final_output, (asked, result)


def case_output_type(server):
    for seed in range(4):
        city = run(server, "Name a city.", temperature=1.0, seed=seed, output_type=City).final_output
        assert isinstance(city, City), city


main(globals())

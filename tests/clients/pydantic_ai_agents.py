"""pydantic-ai: output by tool, by schema and by prompt; several system prompts; a turn with a tool."""

import asyncio
from typing import Annotated, Literal

from common import main
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelResponse, ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.output import PromptedOutput
from pydantic_ai.providers.openai import OpenAIProvider

SETTINGS = {"temperature": 0.0, "max_tokens": 400, "seed": 1}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


def agent(server, **more):
    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.v1, api_key="none"))
    return Agent(model, **{"model_settings": SETTINGS, "retries": 2, **more})


def case_text(server):
    result = agent(server).run_sync("Tell me a story.")
    assert result.output and result.usage.output_tokens > 0


def case_stream(server):
    async def ask():
        async with agent(server).run_stream("Tell me a story.") as result:
            return [piece async for piece in result.stream_text(delta=True)]

    pieces = asyncio.run(ask())
    assert "".join(pieces) == agent(server).run_sync("Tell me a story.").output


def case_several_system_prompts(server):
    several = agent(server, system_prompt=("Be brief.", "Be kind."), instructions="Answer in English.")
    assert several.run_sync("Hello").output


def case_output_by_tool(server):
    for seed in range(6):
        settings = {**SETTINGS, "temperature": 1.0, "seed": seed}
        result = agent(server, output_type=ToolOutput(City), model_settings=settings).run_sync("Name a city.")
        assert isinstance(result.output, City)


def case_output_by_schema(server):
    for seed in range(6):
        settings = {**SETTINGS, "temperature": 1.0, "seed": seed}
        result = agent(server, output_type=NativeOutput(City), model_settings=settings).run_sync("Name a city.")
        assert isinstance(result.output, City)


def case_output_by_prompt(server):
    # Any JSON object comes back; a tiny model may never make it a city.
    try:
        assert isinstance(agent(server, output_type=PromptedOutput(City)).run_sync("Name a city.").output, City)
    except UnexpectedModelBehavior as other:
        assert "retries" in str(other) or "token limit" in str(other), other


def case_a_turn_with_a_tool(server):
    asked = []
    one = agent(server)

    @one.tool_plain
    def get_weather(city: str) -> str:
        """Get the current weather in a city."""
        asked.append(city)
        return '{"temperature": 21, "sky": "sunny"}'

    result = one.run_sync("What is the weather in Rome?")
    assert asked and result.output, asked
    parts = [part for message in result.all_messages() for part in message.parts]
    calls = [part.tool_call_id for part in parts if isinstance(part, ToolCallPart)]
    results = [part.tool_call_id for part in parts if isinstance(part, ToolReturnPart)]
    assert calls == results and len(set(calls)) == len(calls)
    last = result.all_messages()[-1]
    assert isinstance(last, ModelResponse) and last.finish_reason == "stop", last


main(globals())

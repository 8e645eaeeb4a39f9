"""openai-agents over the Responses API: an agent with one function, run, streamed, with an object as its answer.

Called with the address of a running server: `python3 openai_agents_responses.py http://127.0.0.1:8080`.
"""

import asyncio
from typing import Annotated, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import main
from pydantic import BaseModel, ConfigDict, Field

#: Cities that the agent has asked for.
ASKED = []


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    ASKED.append(city)
    return '{"temperature": 21, "sky": "sunny"}'


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    sky: Literal["sunny", "cloudy"]
    degrees: Annotated[int, Field(ge=-40, le=50)]


def agent(model, **more):
    settings = ModelSettings(temperature=0, max_tokens=200, **more.pop("settings", {}))
    # The first call must come; the agent lets the model decide afterwards.
    return Agent(name="Weather", model=model, tools=[get_weather], model_settings=settings, **more)


async def case_run(model):
    ASKED.clear()
    result = await Runner.run(agent(model, settings={"tool_choice": "required"}), "What is the weather in Rome?")
    assert ASKED, "no call"
    assert "21" in result.final_output, result.final_output


async def case_run_streamed(model):
    ASKED.clear()
    result = Runner.run_streamed(agent(model, settings={"tool_choice": "required"}), "What is the weather in Rome?")
    kinds = [event.type async for event in result.stream_events()]
    assert ASKED and "raw_response_event" in kinds and "run_item_stream_event" in kinds
    assert "21" in result.final_output, result.final_output


async def case_next_turn_by_id(model):
    first = await Runner.run(agent(model), "Hello!")
    second = await Runner.run(agent(model), "And again!", previous_response_id=first.last_response_id)
    assert second.final_output is not None
    used = [result.raw_responses[-1].usage.input_tokens for result in (first, second)]
    assert used[1] > used[0], used


async def case_object(model):
    # A small model may think without end before it answers.
    settings = ModelSettings(temperature=0, extra_body={"thinking_budget": 16})
    plain = Agent(name="Sky", model=model, output_type=Answer, model_settings=settings)
    result = await Runner.run(plain, "Describe the sky.")
    assert isinstance(result.final_output, Answer), result.final_output


def call(case, server):
    """Runs a case with a model whose client belongs to the case's event loop."""
    client = openai.AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120)
    asyncio.run(case(OpenAIResponsesModel(model=server.model, openai_client=client)))


set_tracing_disabled(True)
main(globals(), call=call)

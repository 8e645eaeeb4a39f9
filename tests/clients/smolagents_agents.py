"""smolagents: an agent that writes code and one that calls tools, each to its end."""

import logging

from common import main
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from smolagents.memory import ActionStep
from smolagents.monitoring import LogLevel
from smolagents.utils import AgentError, AgentGenerationError

logging.disable(logging.CRITICAL)


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city.

    Args:
        city: The name of the city.
    """
    return "21 degrees in " + city


def finished(server, kind):
    """The steps of an agent that has run to its end."""
    model = OpenAIServerModel(
        server.model, api_base=server.v1, api_key="none", temperature=0, max_tokens=300, seed=1
    )
    agent = kind(tools=[get_weather], model=model, max_steps=3, verbosity_level=LogLevel.OFF)
    answer = agent.run("What is the weather in Rome?")
    assert answer is not None
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    for step in steps:
        # A tiny model may write nonsense, which the agent tells it; the server may not fail.
        assert step.error is None or isinstance(step.error, AgentError), step.error
        assert not isinstance(step.error, AgentGenerationError), step.error
    return steps


def case_code_agent(server):
    steps = finished(server, CodeAgent)
    assert any(step.model_output for step in steps)


def case_tool_calling_agent(server):
    steps = finished(server, ToolCallingAgent)
    calls = [call for step in steps for call in step.tool_calls or []]
    assert calls and all(call.id and call.name for call in calls), calls
    # Every request has `tool_choice: "required"`.
    assert calls[0].name in ("get_weather", "final_answer"), calls


main(globals())

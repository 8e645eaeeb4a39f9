"""LlamaIndex's OpenAILike: chat, streams, completions, tools, objects."""

from typing import Annotated, Literal

from common import QUESTION, main
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

STORY = [ChatMessage(role="user", content="Tell me a story.")]


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return "21 degrees"


def like(server, **more):
    fields = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0, "max_tokens": 300, **more}
    return OpenAILike(
        model=server.model,
        api_base=server.v1,
        api_key="none",
        context_window=8192,
        max_retries=0,
        additional_kwargs={"seed": 1},
        **fields,
    )


def case_chat(server):
    whole = like(server).chat(STORY).message.content
    assert whole and "".join(piece.delta or "" for piece in like(server).stream_chat(STORY)) == whole


def case_completions(server):
    model = like(server, is_chat_model=False)
    whole = model.complete("Once upon a time").text
    assert whole and "".join(piece.delta or "" for piece in model.stream_complete("Once upon a time")) == whole


def case_tools(server):
    tool = FunctionTool.from_defaults(get_weather)
    answer = like(server).chat_with_tools([tool], user_msg=QUESTION)
    calls = like(server).get_tool_calls_from_response(answer, error_on_no_tool_call=True)
    assert [call.tool_name for call in calls] == ["get_weather"] * len(calls)
    result = ChatMessage(role="tool", content="21 degrees", additional_kwargs={"tool_call_id": calls[0].tool_id})
    messages = [ChatMessage(role="user", content=QUESTION), answer.message, result]
    last = like(server).chat_with_tools([tool], chat_history=messages)
    assert last.message.content or last.message.additional_kwargs.get("tool_calls")


def case_structured_predict(server):
    city = like(server).structured_predict(City, PromptTemplate("Name a city."))
    assert isinstance(city, City), city


main(globals())

"""ChatOllama of LangChain: invoke, stream, tools, structured output, embeddings."""

from typing import Annotated, Literal

from common import QUESTION, main
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    size: Literal["small", "large"]


@tool
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return "21 degrees in " + city


def chat(server, **more):
    fields = {"temperature": 0, "num_predict": 200, "seed": 1, **more}
    return ChatOllama(base_url=server.address, model=server.model, **fields)


def case_invoke_and_stream(server):
    answer = chat(server).invoke("Tell me a story.")
    assert answer.content and answer.usage_metadata["output_tokens"] > 0, answer
    assert "".join(chunk.content for chunk in chat(server).stream("Tell me a story.")) == answer.content


def case_tools(server):
    bound = chat(server).bind_tools([get_weather])
    messages = [HumanMessage(QUESTION)]
    answer = bound.invoke(messages)
    assert answer.tool_calls and answer.tool_calls[0]["name"] == "get_weather", answer
    results = [get_weather.invoke(call) for call in answer.tool_calls]
    last = bound.invoke([*messages, answer, *results])
    assert last.content or last.tool_calls, last


def case_structured_output(server):
    for seed in range(4):
        model = chat(server, temperature=1, seed=seed).with_structured_output(City, method="json_schema")
        assert isinstance(model.invoke("Name a city."), City)


def case_embeddings(server):
    embedder = OllamaEmbeddings(base_url=server.address, model=server.model)
    documents = embedder.embed_documents(["a kite", "a rabbit"])
    assert len(documents) == 2 and documents[0] == embedder.embed_query("a kite") != documents[1]


main(globals())

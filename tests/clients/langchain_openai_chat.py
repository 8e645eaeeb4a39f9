"""LangChain: invoke, stream, batch, tools, structured output by its three methods, completions, embeddings."""

import json
from typing import Annotated, Literal

from common import QUESTION, main
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError, LengthFinishReasonError
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
    fields = {"temperature": 0, "max_tokens": 300, "seed": 1, **more}
    return ChatOpenAI(base_url=server.v1, api_key="none", model=server.model, max_retries=0, **fields)


def case_invoke(server):
    answer = chat(server).invoke("Tell me a story.")
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def case_stream(server):
    chunks = list(chat(server, stream_usage=True).stream("Tell me a story."))
    assert "".join(chunk.content for chunk in chunks) == chat(server).invoke("Tell me a story.").content
    assert any(chunk.usage_metadata for chunk in chunks)


def case_beginning(server):
    begun = [("user", "Tell me a story."), ("assistant", "Once upon a time")]
    answer = chat(server, max_tokens=20).invoke(begun)
    assert answer.content and not answer.content.startswith("Once upon a time"), answer
    assert "".join(chunk.content for chunk in chat(server, max_tokens=20).stream(begun)) == answer.content


def case_batch(server):
    answers = chat(server, max_tokens=20).batch(["One.", "Two.", "One."])
    assert answers[0].content == answers[2].content and len(answers) == 3


def case_two_system_messages(server):
    messages = [SystemMessage("Be brief."), SystemMessage("Be kind."), HumanMessage("Hello")]
    assert chat(server).invoke(messages).content


def case_tools(server):
    bound = chat(server).bind_tools([get_weather])
    messages = [HumanMessage(QUESTION)]
    answer = bound.invoke(messages)
    assert answer.tool_calls and not answer.invalid_tool_calls, answer
    results = [get_weather.invoke(call) for call in answer.tool_calls]
    assert all(isinstance(result, ToolMessage) for result in results)
    last = bound.invoke([*messages, answer, *results])
    assert last.content or last.tool_calls
    streamed = None
    for chunk in bound.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    spelled = [[(call["name"], call["args"]) for call in message.tool_calls] for message in (streamed, answer)]
    assert spelled[0] == spelled[1], spelled


def case_tools_that_must_come(server):
    for choice in ("any", "get_weather"):
        answer = chat(server, temperature=1).bind_tools([get_weather], tool_choice=choice).invoke("Hello")
        cut = answer.response_metadata["finish_reason"] == "length"
        assert cut or [call["name"] for call in answer.tool_calls] == ["get_weather"] * len(answer.tool_calls) != []
    one = chat(server).bind_tools([get_weather], parallel_tool_calls=False, strict=True).invoke(QUESTION)
    assert len(one.tool_calls) <= 1


def case_structured_output(server):
    ways = [("function_calling", None), ("function_calling", True), ("json_schema", True), ("json_schema", None)]
    for method, strict in ways:
        for seed in range(4):
            model = chat(server, temperature=1, seed=seed)
            city = model.with_structured_output(City, method=method, strict=strict).invoke("Name a city.")
            assert isinstance(city, City), (method, strict, city)


def case_structured_output_by_json_mode(server):
    whole = 0
    for seed in range(6):
        model = chat(server, temperature=1, seed=seed)
        try:
            found = model.with_structured_output(City, method="json_mode", include_raw=True).invoke("Name a city.")
        except LengthFinishReasonError:
            continue
        # Any object may come, not only a city.
        assert isinstance(json.loads(found["raw"].content), dict), found
        whole += 1
    print(f"  {whole} of 6 objects are whole")


def case_completions(server):
    model = OpenAI(base_url=server.v1, api_key="none", model=server.model, max_tokens=20, temperature=0, seed=1)
    assert model.invoke("Once upon a time")
    assert "".join(model.stream("Once upon a time")) == model.invoke("Once upon a time")


def case_completions_of_several_prompts(server):
    fields = {"max_tokens": 20, "temperature": 0, "seed": 1}
    model = OpenAI(base_url=server.v1, api_key="none", model=server.model, **fields)
    prompts = ["Once upon a time", "The rabbit"]
    generated = model.generate(prompts).generations
    assert [texts[0].text for texts in generated] == [model.invoke(prompt) for prompt in prompts]


def case_a_context_that_is_full(server):
    try:
        chat(server).invoke("word " * 30000)
    except BadRequestError as full:
        assert full.code == "context_length_exceeded", full
        # Programs on top of LangChain shorten the conversation upon this one.
        assert isinstance(full, ContextOverflowError), type(full).__mro__
    else:
        raise AssertionError("no error")


def case_embeddings(server):
    # It cuts texts by OpenAI's own tokens, unless it is told not to.
    embedder = OpenAIEmbeddings(
        base_url=server.v1, api_key="none", model=server.model, check_embedding_ctx_length=False
    )
    documents = embedder.embed_documents(["a kite", "a rabbit"])
    assert len(documents) == 2 and documents[0] == embedder.embed_query("a kite") != documents[1]


main(globals())

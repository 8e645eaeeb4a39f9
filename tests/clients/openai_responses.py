"""openai-python's Responses API: create, stream, parse, tools, conversations that are kept, errors.

Called with the address of a running server: `python3 openai_responses.py http://127.0.0.1:8080`.
"""

import json
from typing import Annotated, Literal

import openai
from common import main
from pydantic import BaseModel, ConfigDict, Field

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city."}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
STORY = "Tell me a story about a rabbit."
#: A small model may think without end before it answers.
FEW_THOUGHTS = {"thinking_budget": 16}
QUESTION = "What is the weather in Rome?"


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(max_length=12)]
    kind: Literal["cat", "dog", "rabbit"]
    age: Annotated[int, Field(ge=0, le=99)]


def case_create(client, model):
    response = client.responses.create(
        model=model, input=STORY, instructions="Be brief.", max_output_tokens=32, extra_body={"seed": 1}
    )
    assert response.object == "response" and response.status in ("completed", "incomplete")
    assert response.output_text and response.output[0].content[0].type == "output_text"
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


def case_stream(client, model):
    fields = {"model": model, "input": STORY, "max_output_tokens": 32, "extra_body": {"seed": 1}}
    whole = client.responses.create(**fields).output_text
    events = list(client.responses.create(stream=True, **fields))
    assert events[0].type == "response.created" and events[0].response.status == "in_progress"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole == events[-1].response.output_text


def case_stream_helper(client, model):
    # The helper waits for `response.completed`, so the text must end by itself.
    with client.responses.stream(model=model, input=STORY, extra_body={"seed": 1, "stop": "."}) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        response = stream.get_final_response()
    assert response.status == "completed" and said == response.output_text and said


def case_parse(client, model):
    for seed in range(5):
        response = client.responses.parse(
            model=model,
            input="Describe a pet.",
            text_format=Pet,
            temperature=1.0,
            max_output_tokens=300,
            extra_body={"seed": seed, **FEW_THOUGHTS},
        )
        assert isinstance(response.output_parsed, Pet), response


def case_stream_parse(client, model):
    with client.responses.stream(
        model=model, input="Describe a pet.", text_format=Pet, extra_body=FEW_THOUGHTS
    ) as stream:
        response = stream.until_done().get_final_response()
    assert isinstance(response.output_parsed, Pet), response


def tool_turn(client, model, again):
    """A call, its result, and what the model says of it; `again` makes the second request."""
    first = client.responses.create(
        model=model, input=QUESTION, tools=[WEATHER], tool_choice="required", temperature=0
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls and calls[0].name == "get_weather", first
    assert "city" in json.loads(calls[0].arguments)
    outputs = [
        {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'}
        for call in calls
    ]
    second = client.responses.create(
        model=model, tools=[WEATHER], temperature=0, max_output_tokens=100, **again(first, outputs)
    )
    assert second.output, second
    return second.output_text, second.usage.input_tokens


def case_tools(client, model):
    def with_everything(first, outputs):
        user = {"role": "user", "content": QUESTION}
        return {"input": [user, *first.output, *outputs], "store": False}

    def with_what_is_new(first, outputs):
        return {"input": outputs, "previous_response_id": first.id}

    whole = tool_turn(client, model, with_everything)
    assert whole == tool_turn(client, model, with_what_is_new)


def case_stream_tools(client, model):
    with client.responses.stream(
        model=model,
        input=QUESTION,
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
        temperature=0,
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        response = stream.get_final_response()
    call = response.output[0]
    assert "".join(pieces) == call.arguments and "city" in json.loads(call.arguments)


def case_conversation(client, model):
    first = client.responses.create(model=model, input="My name is Alice.", max_output_tokens=16)
    second = client.responses.create(
        model=model, input="What is my name?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    items = list(client.responses.input_items.list(first.id))
    assert items[0].role == "user" and items[0].content[0].text == "My name is Alice."
    client.responses.delete(first.id)
    for gone, kind, code in (
        (lambda: client.responses.retrieve(first.id), openai.NotFoundError, "response_not_found"),
        (
            lambda: client.responses.create(model=model, input="And?", previous_response_id=second.id),
            openai.BadRequestError,
            "previous_response_not_found",
        ),
    ):
        try:
            gone()
        except kind as error:
            assert error.code == code, error
        else:
            raise AssertionError("a deleted response is still there")


def case_log_probabilities(client, model):
    response = client.responses.create(
        model=model,
        input=STORY,
        max_output_tokens=8,
        include=["message.output_text.logprobs"],
        top_logprobs=3,
    )
    entries = response.output[0].content[0].logprobs
    assert len(entries) == response.usage.output_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)


def case_tools_of_other_kinds(client, model):
    answer = client.responses.with_raw_response.create(
        model=model, input="Hi", tools=[{"type": "web_search"}, WEATHER], max_output_tokens=8
    )
    assert answer.headers["x-ignored-fields"] == "tools[0]"
    assert [tool.type for tool in answer.parse().tools] == ["function"]


def case_errors(client, model):
    picture = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
    for fields, param in (
        ({"input": [{"role": "user", "content": [picture]}]}, "input[0].content[0].image_url"),
        ({"input": "Hi", "background": True}, "background"),
        ({"input": "Hi", "conversation": "conv_1"}, "conversation"),
    ):
        try:
            client.responses.create(model=model, **fields)
        except openai.BadRequestError as error:
            assert error.param == param, error
        else:
            raise AssertionError(f"{param} was taken")


def call(case, server):
    """Runs a case with a client of its own."""
    client = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120)
    case(client, server.model)


main(globals(), call=call)

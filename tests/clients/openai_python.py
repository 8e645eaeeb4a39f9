"""openai-python: chat, streams, schemas, tools, log-probabilities, completions, models, errors, embeddings."""

import json
import math
from typing import Annotated, List, Literal

import openai
from common import QUESTION, TIME, WEATHER, main, strict
from pydantic import BaseModel, ConfigDict, Field

MESSAGES = [{"role": "user", "content": "Tell me a story about a rabbit."}]


#: Short enough that a small model, too, comes to an end.
Word = Annotated[str, Field(max_length=12)]


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Word
    kind: Literal["cat", "dog", "rabbit"]
    age: Annotated[int, Field(ge=0, le=99)]
    tricks: Annotated[List[Word], Field(max_length=3)]


class Story(BaseModel):
    title: str
    words: List[str]


def client(server):
    return openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=120)


def chat(server, **more):
    fields = {"model": server.model, "messages": MESSAGES, "max_tokens": 40, "seed": 1, **more}
    return client(server).chat.completions.create(**fields)


def valid_calls(choice, *names):
    """The arguments of the calls of `choice`, or none if it was cut off."""
    if choice.finish_reason == "length":
        return []
    assert choice.finish_reason == "tool_calls", choice
    calls = choice.message.tool_calls
    assert calls and len({call.id for call in calls}) == len(calls), choice
    for call in calls:
        assert call.type == "function" and call.function.name in names, call
    return [json.loads(call.function.arguments) for call in calls]


def case_chat(server):
    answer = chat(server)
    assert answer.object == "chat.completion" and answer.model == server.model
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert answer.choices[0].message.content == chat(server).choices[0].message.content


def case_speculation_changes_nothing(server):
    any_object = {"response_format": {"type": "json_object"}}
    for more in ({"temperature": 0}, {"temperature": 1}, {"temperature": 1, **any_object}):
        one = chat(server, **more).choices[0]
        two = chat(server, **more, extra_body={"speculation": "off"}).choices[0]
        assert one.message.content == two.message.content, (one, two)


def case_stream_is_the_same_text(server):
    chunks = list(chat(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = chat(server)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage, chunks[-1]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chat(server, stream=True))


def case_stream_helper(server):
    fields = {"stop": ["."], "max_tokens": 400}
    with client(server).chat.completions.stream(model=server.model, messages=MESSAGES, seed=1, **fields) as stream:
        kinds = {event.type for event in stream}
        assert {"chunk", "content.delta", "content.done"} <= kinds, kinds
        text = stream.get_final_completion().choices[0].message.content
    assert text == chat(server, **fields).choices[0].message.content


def case_a_stream_may_be_left(server):
    stream = chat(server, stream=True, max_tokens=2000)
    next(iter(stream))
    stream.close()
    assert chat(server, max_tokens=2).choices[0].message.content


def case_async_clients_side_by_side(server):
    import asyncio

    async def ask():
        async with openai.AsyncOpenAI(base_url=server.v1, api_key="none") as several:
            create = several.chat.completions.create
            asked = [create(model=server.model, messages=MESSAGES, max_tokens=40, seed=1) for _ in range(8)]
            return await asyncio.gather(*asked)

    texts = {answer.choices[0].message.content for answer in asyncio.run(ask())}
    assert texts == {chat(server).choices[0].message.content}, texts


def parse(server, kind, seed):
    """An object of `kind`, or none if it was cut off."""
    try:
        answer = client(server).chat.completions.parse(
            model=server.model,
            messages=[{"role": "user", "content": "Invent a pet."}],
            response_format=kind,
            temperature=1,
            seed=seed,
            max_tokens=600,
        )
    except openai.LengthFinishReasonError as cut:
        assert cut.completion.choices[0].finish_reason == "length"
        return None
    assert isinstance(answer.choices[0].message.parsed, kind)
    return answer.choices[0].message.parsed


def case_parse_gives_an_object_at_every_seed(server):
    assert all(parse(server, Pet, seed) for seed in range(24))
    whole = [parse(server, Story, seed) for seed in range(24)]
    print(f"  {24 - whole.count(None)} of 24 objects without bounds are whole")


def case_stream_with_a_schema(server):
    for seed in range(6):
        with client(server).chat.completions.stream(
            model=server.model, messages=MESSAGES, response_format=Pet, seed=seed, max_tokens=600
        ) as stream:
            texts = [event.content for event in stream if event.type == "content.done"]
            message = stream.get_final_completion().choices[0].message
        assert isinstance(message.parsed, Pet) and texts == [message.content]


def case_json_object(server):
    for seed in range(12):
        choice = chat(server, seed=seed, max_tokens=200, response_format={"type": "json_object"}).choices[0]
        assert choice.message.content.startswith("{"), choice
        if choice.finish_reason != "length":
            assert isinstance(json.loads(choice.message.content), dict)


def ask_weather(server, **more):
    messages = [{"role": "user", "content": QUESTION}]
    fields = {"messages": messages, "tools": [WEATHER, TIME], "max_tokens": 200, "temperature": 0, **more}
    return chat(server, **fields)


def case_tools_auto(server):
    choice = ask_weather(server, tools=[WEATHER]).choices[0]
    assert valid_calls(choice, "get_weather"), choice
    plain = ask_weather(server, tool_choice="none").choices[0]
    assert plain.message.tool_calls is None and plain.finish_reason in ("stop", "length")


def case_tools_required(server):
    for seed in range(8):
        for arguments in valid_calls(
            ask_weather(server, tool_choice="required", seed=seed, temperature=1).choices[0], "get_weather", "get_time"
        ):
            fits = isinstance(arguments.get("city"), str) or arguments in ({"zone": "UTC"}, {"zone": "CET"})
            assert fits, arguments


def case_tools_named(server):
    named = {"type": "function", "function": {"name": "get_time"}}
    for seed in range(8):
        choice = ask_weather(server, tool_choice=named, seed=seed, temperature=1).choices[0]
        # OpenAI ends a call that was named with `stop`.
        assert choice.finish_reason in ("stop", "tool_calls", "length"), choice
        for call in choice.message.tool_calls or []:
            assert call.function.name == "get_time"
            assert json.loads(call.function.arguments) in ({"zone": "UTC"}, {"zone": "CET"}), call
        assert choice.message.tool_calls or choice.finish_reason == "length"


def case_tools_one_at_a_time(server):
    for seed in range(4):
        choice = ask_weather(
            server, tool_choice="required", parallel_tool_calls=False, seed=seed, temperature=1
        ).choices[0]
        assert len(valid_calls(choice, "get_weather", "get_time")) <= 1


def case_tools_strict(server):
    tools = [strict(WEATHER), strict(TIME)]
    for seed in range(8):
        choice = ask_weather(server, tools=tools, seed=seed, temperature=1).choices[0]
        for call in choice.message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            wanted = {"get_weather": {"city"}, "get_time": {"zone"}}[call.function.name]
            assert set(arguments) == wanted, call


def case_parse_of_a_tool(server):
    class GetWeather(BaseModel):
        """Get the current weather in a city."""

        city: str

    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    answer = client(server).chat.completions.parse(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[tool],
        tool_choice="required",
        temperature=0,
        max_tokens=300,
    )
    for call in answer.choices[0].message.tool_calls:
        assert isinstance(call.function.parsed_arguments, GetWeather), call


def case_tools_streamed(server):
    whole = ask_weather(server, tools=[WEATHER]).choices[0].message.tool_calls
    calls, finish = {}, None
    for chunk in ask_weather(server, tools=[WEATHER], stream=True):
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            if delta.index not in calls:
                assert delta.id and delta.type == "function" and delta.function.name
                calls[delta.index] = [delta.function.name, ""]
            calls[delta.index][1] += delta.function.arguments or ""
    assert finish == "tool_calls"
    assert [tuple(call) for call in calls.values()] == [(c.function.name, c.function.arguments) for c in whole]


def case_tools_in_the_stream_helper(server):
    with client(server).chat.completions.stream(
        model=server.model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[strict(WEATHER)],
        temperature=0,
        max_tokens=200,
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert [event.arguments for event in done] == [call.function.arguments for call in calls] != []


def case_a_whole_turn_with_a_tool(server):
    messages = [{"role": "user", "content": QUESTION}]
    message = ask_weather(server, tools=[WEATHER]).choices[0].message
    messages.append(message)
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "sky": "sunny"}'})
    choice = ask_weather(server, messages=messages, tools=[WEATHER]).choices[0]
    assert choice.finish_reason in ("stop", "length") and choice.message.content, choice


def case_log_probabilities(server):
    choice = chat(server, max_tokens=8, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    for token in choice.logprobs.content:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert math.isclose(token.logprob, token.top_logprobs[0].logprob, abs_tol=1e-6), token
    text = b"".join(bytes(token.bytes) for token in choice.logprobs.content)
    assert text.decode(errors="replace").startswith(choice.message.content[:4])
    streamed = list(chat(server, max_tokens=8, logprobs=True, temperature=0, stream=True))
    tokens = [t.token for c in streamed if c.choices and c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert tokens == [token.token for token in choice.logprobs.content]


def case_stop_and_bias(server):
    text = chat(server, temperature=0).choices[0].message.content
    stop = text[5:8]
    stopped = chat(server, temperature=0, stop=[stop]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(stop)]
    assert chat(server, temperature=0, logit_bias={"5": -100}).choices[0].message.content


def case_completions(server):
    create = client(server).completions.create
    fields = {"model": server.model, "prompt": "Once upon a time", "max_tokens": 20, "seed": 3}
    answer = create(**fields)
    assert answer.object == "text_completion" and answer.choices[0].text
    assert "".join(c.choices[0].text for c in create(**fields, stream=True)) == answer.choices[0].text
    assert create(**fields, logprobs=2).choices[0].logprobs.token_logprobs
    assert create(**{**fields, "prompt": [10, 11, 12]}).choices[0].text is not None


def case_models(server):
    listed = client(server).models.list().data
    assert listed[0].id == server.model and listed[0].object == "model"
    assert client(server).models.retrieve(server.model).id == server.model


def case_raw_answers_have_an_id(server):
    fields = {"model": server.model, "messages": MESSAGES, "max_tokens": 1}
    raw = client(server).chat.completions.with_raw_response.create(**fields)
    assert raw.headers["x-request-id"] and raw.parse()._request_id == raw.headers["x-request-id"]


def expect(error, call):
    try:
        call()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}")


def case_errors(server):
    bad = expect(openai.BadRequestError, lambda: chat(server, temperature=7))
    assert bad.param == "temperature" and bad.status_code == 400, bad
    long = [{"role": "user", "content": "word " * 30000}]
    full = expect(openai.BadRequestError, lambda: chat(server, messages=long))
    assert full.code == "context_length_exceeded", full
    expect(openai.NotFoundError, lambda: client(server).get("/nothing", cast_to=object))
    hurried = client(server).with_options(timeout=0.001)
    expect(openai.APITimeoutError, lambda: hurried.chat.completions.create(model=server.model, messages=MESSAGES))
    nobody = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
    expect(openai.APIConnectionError, lambda: nobody.models.list())


def case_embeddings(server):
    texts = ["a kite", "a rabbit and a kite"]
    # Without a format the library asks for base64 and reads it.
    answer = client(server).embeddings.create(model=server.model, input=texts)
    assert [one.index for one in answer.data] == [0, 1] and answer.model == server.model, answer
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0, answer
    for one in answer.data:
        assert math.isclose(math.hypot(*one.embedding), 1, abs_tol=1e-5), one
    listed = client(server).embeddings.create(model=server.model, input=texts[0], encoding_format="float")
    assert listed.data[0].embedding == answer.data[0].embedding
    short = client(server).embeddings.create(model=server.model, input=texts[0], dimensions=8)
    assert len(short.data[0].embedding) == 8


main(globals())

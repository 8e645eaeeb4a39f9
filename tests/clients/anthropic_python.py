"""Anthropic's Python library against a running server: `anthropic_python.py http://HOST:PORT`.

A model may be too small to answer well. So cases check what the server promises whatever the
model writes: blocks, valid calls, numbers of tokens, errors. An answer may be cut off by its limit.
"""

import asyncio
import json

import anthropic
from common import main

STORY = [{"role": "user", "content": "Tell me a story about a rabbit."}]
QUESTION = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the current weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Server:
    """The server under test, and its model."""

    def __init__(self, address):
        # The library adds the folder itself.
        self.address = address.rstrip("/").removesuffix("/v1")
        self.client = anthropic.Anthropic(base_url=self.address, api_key="none", max_retries=0, timeout=120)
        self.model = self.client.models.list().data[0].id

    def fields(self, **more):
        """The arguments of a request. The library knows no sampling: that goes beside them."""
        names = ["seed", "temperature", "speculation"]
        body = {"seed": 1, **{name: more.pop(name) for name in names if name in more}}
        return {"model": self.model, "messages": STORY, "max_tokens": 40, "extra_body": body, **more}

    def create(self, **more):
        return self.client.messages.create(**self.fields(**more))


def said(message):
    """What two answers to one request have in common."""
    blocks = []
    for block in message.content:
        fields = block.to_dict()
        fields.pop("id", None)
        blocks.append(fields)
    return blocks, message.stop_reason, message.usage.output_tokens


def prompt_tokens(message):
    return message.usage.input_tokens + message.usage.cache_read_input_tokens


def case_models(server):
    page = server.client.models.list()
    model = page.data[0]
    assert model.type == "model" and model.display_name and model.created_at.year > 2000, model
    assert page.has_more is False and page.first_id == page.last_id == model.id, page
    assert server.client.models.retrieve(model.id) == model


def case_create(server):
    message = server.create(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}])
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert message.model == server.model and message._request_id, message
    assert [block.type for block in message.content] == ["text"], message
    assert message.content[0].text and message.usage.output_tokens <= 40, message
    assert message.speculation["engaged"] is True and message.seed == 1, message


def case_stream(server):
    whole = server.create(temperature=0.8)
    with server.client.messages.stream(**server.fields(temperature=0.8)) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said(final) == said(whole) and text == whole.content[0].text, (final, whole)
    assert prompt_tokens(final) == prompt_tokens(whole), (final, whole)
    fields = server.fields(temperature=0.8, speculation="off")
    with server.client.messages.create(**fields, stream=True) as stream:
        events = list(stream)
    delta = events[-2]
    assert [events[0].type, delta.type, events[-1].type] == ["message_start", "message_delta", "message_stop"]
    assert delta.speculation["engaged"] is False and delta.seed == 1, delta
    plain = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert plain == text, "speculation changed the text"


def case_ends(server):
    text = server.create(temperature=0).content[0].text
    stop = text[4:8]
    message = server.create(temperature=0, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop), message
    assert "".join(block.text for block in message.content) == text[: text.index(stop)], message
    assert server.create(max_tokens=2).stop_reason == "max_tokens"


def case_count_tokens(server):
    for more in [
        {},
        {"system": "Be brief.", "tools": [WEATHER]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    ]:
        count = server.client.messages.count_tokens(model=server.model, messages=STORY, **more)
        more.pop("budget_tokens", None)
        assert count.input_tokens == prompt_tokens(server.create(**{"max_tokens": 2, **more})), more
    long = [{"role": "user", "content": "word " * 20000}]
    assert server.client.messages.count_tokens(model=server.model, messages=long).input_tokens > 20000


def case_tools(server):
    for choice in [{"type": "any"}, {"type": "tool", "name": "get_weather"}]:
        choice["disable_parallel_tool_use"] = True
        fields = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 200}
        message = server.create(**fields)
        assert message.stop_reason == "tool_use", message
        call = message.content[-1]
        assert call.type == "tool_use" and call.id.startswith("toolu_"), message
        assert call.name == "get_weather" and list(call.input) == ["city"], message
        with server.client.messages.stream(**server.fields(**fields)) as stream:
            final = stream.get_final_message()
        assert said(final) == said(message), (final, message)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21 degrees"}]}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    told = server.create(messages=QUESTION + turns, tools=[WEATHER])
    assert told.content and told.stop_reason in ("end_turn", "max_tokens", "tool_use"), told


def case_tool_runner(server):
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Get the current weather in a city.

        Args:
            city: The name of the city.
        """
        asked.append(city)
        return json.dumps({"temperature": 21, "sky": "sunny"})

    runner = server.client.beta.messages.tool_runner(
        model=server.model, max_tokens=200, tools=[get_weather], messages=QUESTION, max_iterations=4,
        extra_body={"temperature": 0},
    )
    final = runner.until_done()
    # A model that does not call answers at once.
    assert asked or final.stop_reason != "tool_use", final


def case_thinking(server):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"thinking": thinking, "max_tokens": 1500, "temperature": 0}
    message = server.create(**fields)
    kinds = [block.type for block in message.content]
    assert set(kinds) <= {"thinking", "text"}, message
    if "thinking" in kinds:
        assert kinds[0] == "thinking" and message.content[0].signature == "", message
        assert message.usage.output_tokens_details.thinking_tokens > 0, message
    with server.client.messages.stream(**server.fields(**fields)) as stream:
        assert said(stream.get_final_message()) == said(message)
    again = [{"role": "assistant", "content": message.content}, {"role": "user", "content": "Go on."}]
    assert server.create(messages=STORY + again, thinking=thinking, max_tokens=20).content
    off = server.create(thinking={"type": "disabled"})
    assert [block.type for block in off.content] == ["text"], off


def case_schema(server):
    schema = {
        "type": "object",
        "properties": {"sky": {"enum": ["sunny", "cloudy"]}, "rain": {"type": "boolean"}},
        "required": ["sky", "rain"],
        "additionalProperties": False,
    }
    config = {"format": {"type": "json_schema", "schema": schema}}
    for seed in range(5):
        message = server.create(messages=QUESTION, output_config=config, max_tokens=100, seed=seed)
        if message.stop_reason != "max_tokens":
            answer = json.loads(message.content[0].text)
            assert answer["sky"] in ("sunny", "cloudy") and isinstance(answer["rain"], bool), message


def case_beginning(server):
    begun = [*STORY, {"role": "assistant", "content": "Once upon a time"}]
    client = server.client
    fields = {"model": server.model, "max_tokens": 20, "messages": begun, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**fields)
    text = answer.content[0].text
    assert text and not text.startswith("Once upon a time"), answer
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text


def case_many_at_once(server):
    async def ask():
        client = anthropic.AsyncAnthropic(base_url=server.address, api_key="none", timeout=120)
        fields = server.fields(temperature=0)
        answers = await asyncio.gather(*[client.messages.create(**fields) for _ in range(6)])
        assert len({str(said(answer)) for answer in answers}) == 1, answers

    asyncio.run(ask())


def expect(error, call):
    try:
        call()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}")


def case_errors(server):
    def refused(error, kind, call):
        caught = expect(error, call)
        body = caught.body
        assert body["type"] == "error" and body["error"]["type"] == kind, body
        assert body["request_id"] == caught.request_id, (body, caught.request_id)
        return body["error"]["message"]

    bad, kind = anthropic.BadRequestError, "invalid_request_error"
    assert "`temperature`" in refused(bad, kind, lambda: server.create(temperature=7))
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    seen = [{"role": "user", "content": [image]}]
    assert "`messages[0].content[0]" in refused(bad, kind, lambda: server.create(messages=seen))
    search = [{"type": "web_search_20250305", "name": "web_search"}]
    assert "`web_search_20250305`" in refused(bad, kind, lambda: server.create(tools=search))
    long = [{"role": "user", "content": "word " * 300000}]
    told = refused(bad, kind, lambda: server.create(messages=long))
    assert told.startswith("prompt is too long"), told
    refused(anthropic.NotFoundError, "not_found_error", lambda: server.client.models.retrieve("nobody"))
    refused(anthropic.NotFoundError, "not_found_error", lambda: server.client.messages.batches.list())


main(globals(), Server)

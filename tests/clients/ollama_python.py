"""ollama-python: list, show, ps, chat, streams, tools, thinking, a schema, generate, errors, embeddings."""

import json

import ollama
from common import QUESTION, WEATHER, main

MESSAGES = [{"role": "user", "content": "Tell me a story about a rabbit."}]
OPTIONS = {"temperature": 0, "num_predict": 40, "seed": 1}


def client(server):
    return ollama.Client(host=server.address, timeout=120)


def chat(server, **more):
    return client(server).chat(**{"model": server.model, "messages": MESSAGES, "options": OPTIONS, **more})


def case_list_show_and_ps(server):
    listed = client(server).list().models[0]
    assert listed.model.split(":")[0] == server.model and listed.size > 0 and len(listed.digest) == 64, listed
    shown = client(server).show(listed.model)
    assert "completion" in shown.capabilities and "tools" in shown.capabilities, shown
    family = shown.modelinfo["general.architecture"]
    assert shown.modelinfo[f"{family}.context_length"] > 0, shown
    assert shown.details.parameter_size and shown.details.quantization_level and shown.template
    assert client(server).ps().models[0].model == listed.model


def case_chat_and_stream(server):
    answer = chat(server)
    assert answer.done and answer.done_reason in ("stop", "length") and answer.message.content, answer
    assert answer.prompt_eval_count > 0 and answer.eval_count > 0 and answer.total_duration > 0
    parts = list(chat(server, stream=True))
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert parts[-1].done and parts[-1].eval_count == answer.eval_count


def case_tools(server):
    options = {**OPTIONS, "num_predict": 200}
    messages = [{"role": "user", "content": QUESTION}]
    message = chat(server, messages=messages, tools=[WEATHER], options=options).message
    call = message.tool_calls[0].function
    assert call.name == "get_weather" and "city" in call.arguments, message
    parts = chat(server, messages=messages, tools=[WEATHER], options=options, stream=True)
    streamed = [call for part in parts for call in part.message.tool_calls or []]
    assert [c.function for c in streamed] == [c.function for c in message.tool_calls]
    result = {"role": "tool", "tool_name": call.name, "content": "21 degrees"}
    last = chat(server, messages=[*messages, message, result], tools=[WEATHER], options=options).message
    assert last.content or last.tool_calls, last


def case_a_function_as_a_tool(server):
    def get_weather(city: str) -> str:
        """Get the current weather in a city.

        Args:
            city: The name of the city.
        """
        return "21 degrees in " + city

    options = {**OPTIONS, "num_predict": 200}
    messages = [{"role": "user", "content": QUESTION}]
    calls = chat(server, messages=messages, tools=[get_weather], options=options).message.tool_calls
    assert calls and get_weather(**calls[0].function.arguments).startswith("21 degrees")


def case_a_schema(server):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    for seed in range(4):
        options = {"temperature": 1, "seed": seed, "num_predict": 300}
        text = chat(server, format=schema, options=options).message.content
        assert set(json.loads(text)) == {"name", "size"}, text


def case_thinking(server):
    if "thinking" in client(server).show(server.model).capabilities:
        message = chat(server, think=True).message
        assert message.thinking or message.content, message
    assert chat(server, think=False).message.thinking is None


def case_generate(server):
    generate = client(server).generate
    fields = {"model": server.model, "prompt": "Tell me a story.", "options": OPTIONS}
    answer = generate(**fields)
    assert answer.response and answer.done
    assert "".join(part.response for part in generate(**fields, stream=True)) == answer.response
    assert generate(**{**fields, "prompt": "Once upon a time"}, raw=True).response
    assert generate(model=server.model).done_reason == "load"


def case_errors(server):
    calls = [
        lambda: chat(server, options={"temperature": 9}),
        lambda: client(server).show("nobody"),
        lambda: client(server).pull("nobody"),
    ]
    for call, status in zip(calls, (400, 404, 400)):
        try:
            call()
        except ollama.ResponseError as error:
            assert error.status_code == status and error.error, error
        else:
            raise AssertionError("no error")


def case_embed(server):
    texts = ["a kite", "a rabbit and a kite"]
    answer = client(server).embed(model=server.model, input=texts)
    assert len(answer.embeddings) == 2 and answer.prompt_eval_count > 2 and answer.total_duration > 0, answer
    for vector in answer.embeddings:
        assert abs(sum(x * x for x in vector) - 1) < 1e-5
    one = client(server).embed(model=server.model, input=texts[0], truncate=False, keep_alive="5m")
    assert one.embeddings[0] == answer.embeddings[0]
    assert len(client(server).embed(model=server.model, input=texts[0], dimensions=8).embeddings[0]) == 8
    # The older form has the numbers as the model does.
    older = client(server).embeddings(model=server.model, prompt=texts[0]).embedding
    length = sum(x * x for x in older) ** 0.5
    assert all(abs(a / length - b) < 1e-5 for a, b in zip(older, one.embeddings[0], strict=True))


def case_fill_in_the_middle(server):
    fills = "insert" in client(server).show(server.model).capabilities
    ask = {"model": server.model, "prompt": "int main() {\n", "suffix": "}\n", "options": OPTIONS}
    try:
        assert client(server).generate(**ask).done and fills
    except ollama.ResponseError as error:
        assert not fills and error.status_code == 400 and "`suffix`" in error.error, error


main(globals())

"""LiteLLM: completion, streams, tools, a JSON schema, and its error for a context that is full."""

import json
import os

# The prices of models are not fetched.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from common import QUESTION, WEATHER, main

litellm.suppress_debug_info = True


def completion(server, provider="openai", **more):
    fields = {"temperature": 0, "max_tokens": 300, "seed": 1, "num_retries": 0, **more}
    fields.setdefault("messages", [{"role": "user", "content": "Tell me a story."}])
    return litellm.completion(model=f"{provider}/{server.model}", api_base=server.v1, api_key="none", **fields)


def case_completion(server):
    texts = set()
    for provider in ("openai", "hosted_vllm"):
        answer = completion(server, provider)
        assert answer.usage.completion_tokens > 0
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1 and "" not in texts, texts


def case_stream(server):
    chunks = list(completion(server, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == completion(server).choices[0].message.content
    assert any(getattr(chunk, "usage", None) for chunk in chunks)


def case_tools(server):
    messages = [{"role": "user", "content": QUESTION}]
    message = completion(server, messages=messages, tools=[WEATHER]).choices[0].message
    assert json.loads(message.tool_calls[0].function.arguments)
    messages.append(message.model_dump())
    for call in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    last = completion(server, messages=messages, tools=[WEATHER]).choices[0]
    assert last.message.content or last.message.tool_calls
    chunks = list(completion(server, messages=messages[:1], tools=[WEATHER], stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=messages[:1]).choices[0]
    assert built.finish_reason == "tool_calls"
    spelled = [[c.function.arguments for c in m.tool_calls] for m in (built.message, message)]
    assert spelled[0] == spelled[1], spelled


def case_json_schema(server):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}}
    for seed in range(6):
        text = completion(server, response_format=wanted, seed=seed, temperature=1).choices[0].message.content
        assert set(json.loads(text)) == {"name", "size"}, text


def case_text_completion(server):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{server.model}",
        api_base=server.v1,
        api_key="none",
        prompt="Once upon a time",
        max_tokens=20,
    )
    assert answer.choices[0].text


def case_a_context_that_is_full(server):
    try:
        completion(server, messages=[{"role": "user", "content": "word " * 20000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no error")


main(globals())

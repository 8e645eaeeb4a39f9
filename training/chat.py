"""Writes a conversation as the text that a model of each family reads.

The wire forms are those of the official chat templates; `templates/` holds our
own Jinja versions, which ship with the models, and `test_chat.py` checks that
both write the same text.

    Gemma                                     Qwen
    <|turn>system                             <|im_start|>system
    <|think|>                                 …<|im_end|>
    …<|tool>declaration:…<tool|><turn|>       <|im_start|>user
    <|turn>user                               …<|im_end|>
    …<turn|>                                  <|im_start|>assistant
    <|turn>model                              <think>
    <|channel>thought                         …
    …                                         </think>
    <channel|>…<turn|>
                                              …<|im_end|>

Gemma keeps a tool's result inside the model's turn, Qwen sends it as a user's
turn. Thoughts before the last question are dropped, as the templates do.
Deliberately absent: tokens; the text is tokenized elsewhere.
"""

import json

# What follows a document when documents are packed into one row.
END = {"gemma": "<eos>", "qwen": "<|endoftext|>"}

# The words that the Qwen template puts around the declarations.
QWEN_TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
QWEN_TOOLS_TAIL = (
    "\n</tools>\n\nTo call a function, reply in this form:\n\n<tool_call>\n<function=NAME>\n"
    "<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>"
)


def gemma_value(value):
    """A JSON value in Gemma's notation: strings between `<|"|>`, keys bare."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return "null" if value is None else str(value)


def gemma_declaration(tool):
    function = tool["function"]
    parameters = function["parameters"]
    fields = []
    for key in sorted(parameters["properties"]):
        field = parameters["properties"][key]
        about = f'description:{gemma_value(field["description"])},' if field.get("description") else ""
        fields.append(f'{key}:{{{about}type:{gemma_value(field["type"].upper())}}}')
    required = ",".join(map(gemma_value, parameters["required"]))
    return (
        f'<|tool>declaration:{function["name"]}{{description:{gemma_value(function["description"])},'
        f'parameters:{{properties:{{{",".join(fields)}}},required:[{required}],'
        f'type:{gemma_value(parameters["type"].upper())}}}}}<tool|>'
    )


def last_question(messages):
    """The index of the last user message: thoughts before it are dropped."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return users[-1] if users else -1


def gemma(messages, tools=(), thinking=False, ask=False):
    """The conversation in Gemma's form; `ask` opens the model's next turn."""
    out = ["<bos>"]
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if system is not None or tools or thinking:
        out.append("<|turn>system\n")
        if thinking:
            out.append("<|think|>\n")
        out.append(system or "")
        out += map(gemma_declaration, tools)
        out.append("<turn|>\n")
    last, open_turn = last_question(messages), False
    for i, message in enumerate(messages):
        if message["role"] == "system":
            continue
        if message["role"] == "tool":
            out.append(
                f'<|tool_response>response:{message["name"]}{{value:{gemma_value(message["content"])}}}<tool_response|>'
            )
            continue
        if message["role"] == "user":
            out.append(f'<|turn>user\n{message["content"]}<turn|>\n')
            continue
        if not open_turn:
            out.append("<|turn>model\n")
        if message.get("reasoning") and i > last:
            out.append(f'<|channel>thought\n{message["reasoning"]}\n<channel|>')
        for call in message.get("tool_calls", ()):
            out.append(f'<|tool_call>call:{call["name"]}{gemma_value(call["arguments"])}<tool_call|>')
        out.append(message["content"])
        open_turn = bool(message.get("tool_calls"))
        if not open_turn:
            out.append("<turn|>\n")
    if ask and not open_turn:
        out.append("<|turn>model\n")
    elif open_turn and not ask and messages[-1]["role"] == "assistant":
        # The model hands over by opening the response itself.
        out.append("<|tool_response>")
    return "".join(out)


def qwen_value(value):
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen_call(call):
    parameters = "".join(
        f"<parameter={k}>\n{qwen_value(v)}\n</parameter>\n" for k, v in call["arguments"].items()
    )
    return f'<tool_call>\n<function={call["name"]}>\n{parameters}</function>\n</tool_call>'


def qwen(messages, tools=(), thinking=False, ask=False):
    """The conversation in Qwen's form; `ask` opens the assistant's next turn."""
    out = []
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools:
        declarations = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = QWEN_TOOLS_HEAD + declarations + QWEN_TOOLS_TAIL + (f"\n\n{system}" if system else "")
        out.append(f"<|im_start|>system\n{text}<|im_end|>\n")
    elif system is not None:
        out.append(f"<|im_start|>system\n{system}<|im_end|>\n")
    last = last_question(messages)
    for i, message in enumerate(messages):
        if message["role"] == "system":
            continue
        if message["role"] == "user":
            out.append(f'<|im_start|>user\n{message["content"]}<|im_end|>\n')
            continue
        if message["role"] == "tool":
            out.append(
                f'<|im_start|>user\n<tool_response>\n{message["content"]}\n</tool_response><|im_end|>\n'
            )
            continue
        out.append("<|im_start|>assistant\n")
        if i > last:
            reasoning = message.get("reasoning", "")
            out.append(f"<think>\n{reasoning}\n</think>\n\n")
        calls = "\n".join(map(qwen_call, message.get("tool_calls", ())))
        out.append(message["content"] + ("\n\n" if message["content"] and calls else "") + calls)
        out.append("<|im_end|>\n")
    if ask:
        out.append("<|im_start|>assistant\n<think>\n" + ("" if thinking else "\n</think>\n\n"))
    return "".join(out)


RENDER = {"gemma": gemma, "qwen": qwen}


def document(record, family):
    """The training text of a corpus record or a conversation, with its end."""
    if "text" in record:
        return ("<bos>" if family == "gemma" else "") + record["text"] + END[family]
    talk = as_conversation(record)
    return RENDER[family](talk["messages"], talk["tools"], talk["thinking"]) + END[family]


def as_conversation(record):
    """A corpus record (`{prompt, response}`, `{turns}`, `{prompt, tools,
    tool_call}`) as a conversation; a conversation is returned as it is."""
    if "messages" in record:
        return {"tools": [], "thinking": False, **record}
    if "tool_call" in record:
        call = record["tool_call"]
        messages = [{"role": "user", "content": record["prompt"]}]
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        return {"messages": messages, "tools": [plain_tool(t) for t in record["tools"]], "thinking": False}
    turns = record.get("turns") or [record["prompt"], record["response"]]
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": messages, "tools": [], "thinking": False}


def plain_tool(tool):
    """`{name, parameters: {key: type}}` of the corpus as a full declaration."""
    fields = {key: {"type": kind} for key, kind in tool["parameters"].items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    about = tool["name"].replace("_", " ").capitalize() + "."
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": about, "parameters": parameters},
    }

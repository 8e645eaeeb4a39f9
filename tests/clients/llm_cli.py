"""The `llm` command: text, a conversation, a tool, a schema."""

import json
import os
import subprocess
import sys
import tempfile

from common import QUESTION, main


def llm(server, *arguments, text=None, logs=False):
    """What `llm` prints: the answer, or what it logs."""
    with tempfile.TemporaryDirectory() as folder:
        models = [
            {
                "model_id": "local",
                "model_name": server.model,
                "api_base": server.v1,
                "supports_schema": True,
                "supports_tools": True,
            }
        ]
        with open(os.path.join(folder, "extra-openai-models.yaml"), "w") as file:
            json.dump(models, file)
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        command = [sys.executable, "-m", "llm", *arguments]
        ran = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return (ran.stderr if logs else ran.stdout).strip()


def options(**more):
    fields = {"temperature": 0, "max_tokens": 200, "seed": 1, **more}
    return [word for name, value in fields.items() for word in ("-o", name, str(value))]


def case_text(server):
    streamed = llm(server, "-m", "local", *options(), "Tell me a story.")
    assert streamed == llm(server, "-m", "local", "--no-stream", *options(), "Tell me a story.") != ""
    assert llm(server, "-m", "local", "-s", "Be brief.", *options(), text="Hello")


def case_tool(server):
    function = "def get_weather(city: str) -> str:\n    'Get the current weather in a city.'\n    return '21 degrees'\n"
    words = ["-m", "local", *options(), "--functions", function, "--chain-limit", "4", "--td", QUESTION]
    logged = llm(server, *words, logs=True)
    assert "Tool call: get_weather(" in logged and "21 degrees" in logged, logged


def case_tool_of_llm_itself(server):
    assert llm(server, "-m", "local", *options(), "-T", "llm_version", "Hello")


def case_schema(server):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"enum": ["small", "large"]}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    for seed in range(3):
        said = llm(
            server,
            "-m",
            "local",
            *options(seed=seed, temperature=1),
            "--schema",
            json.dumps(schema),
            "Name a city.",
        )
        assert set(json.loads(said)) == {"name", "size"}, said


main(globals())

"""What the scripts of this folder share: the server's address, and cases that are run in order.

A script is called with the address of a running server: `python3 SCRIPT http://127.0.0.1:8080`.
A model may be too small to answer well. So cases check what the server promises whatever the
model writes: valid objects, ids, reasons of an end. An answer may always be cut off by its limit.
"""

import json
import sys
import time
import traceback
import urllib.request

#: A question that the bundled models answer with a call of `WEATHER`.
QUESTION = "What is the weather in Rome?"

#: A tool as Chat Completions describe it.
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city."}},
            "required": ["city"],
        },
    },
}

#: A second tool, so that there is a choice.
TIME = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a time zone.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["UTC", "CET"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}


def strict(tool):
    """`tool`, whose calls must fit its schema."""
    parameters = {**tool["function"]["parameters"], "additionalProperties": False}
    return {**tool, "function": {**tool["function"], "parameters": parameters, "strict": True}}


class Server:
    """The server under test."""

    def __init__(self, address):
        self.address = address.rstrip("/")
        #: The base URL of the OpenAI API.
        self.v1 = self.address + "/v1"
        with urllib.request.urlopen(self.v1 + "/models", timeout=30) as answer:
            self.model = json.load(answer)["data"][0]["id"]


def main(names, open_server=Server, call=lambda case, server: case(server)):
    """Runs the functions called `case_…` among `names` in their order; exits with 1 if one fails.

    `open_server` makes of the address what cases are given, with the name of its `model`; `call`
    runs a case.
    """
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} http://HOST:PORT")
    server, failed = open_server(sys.argv[1]), []
    for name, case in list(names.items()):
        if not name.startswith("case_"):
            continue
        start = time.monotonic()
        try:
            call(case, server)
        except Exception:
            failed.append(name)
            traceback.print_exc()
        word = "FAILED" if name in failed else "ok"
        print(f"{word} {name[5:]} ({time.monotonic() - start:.1f} s)", flush=True)
    if failed:
        sys.exit(f"{len(failed)} failed with {server.model}: {' '.join(failed)}")

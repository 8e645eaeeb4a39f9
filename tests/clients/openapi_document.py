"""`/openapi.json`: a valid document, by which Schemathesis makes requests that no server error answers."""

import json
import subprocess
import sys
import urllib.request

from openapi_spec_validator import validate

from common import main

# Both answer 501 to whatever they are sent: nothing can be changed.
REFUSED = ["/props", "/lora-adapters"]


def case_valid(server):
    with urllib.request.urlopen(f"{server.address}/openapi.json") as answer:
        document = json.load(answer)
    validate(document)
    assert "/v1/chat/completions" in document["paths"], document["paths"].keys()


def case_no_server_error(server):
    checks = "not_a_server_error,content_type_conformance"
    excluded = [word for path in REFUSED for word in ("--exclude-path", path)]
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.address}/openapi.json"]
    command += ["--checks", checks, "--max-examples", "5", "--request-timeout", "30", "--no-color", *excluded]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr


main(globals())

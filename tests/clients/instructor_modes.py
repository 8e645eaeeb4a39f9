"""instructor: objects by tool calls, by JSON mode and by a JSON schema."""

from typing import Annotated, List, Literal

import instructor
import openai
from common import main
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict, Field

Word = Annotated[str, Field(max_length=12)]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Word
    mood: Literal["happy", "sad"]
    friends: Annotated[List[Word], Field(max_length=2)]


def people(server, mode, seeds, **more):
    """How many of some requests give a person; the others must be cut off."""
    plain = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0)
    client = instructor.from_openai(plain, mode=mode)
    n = 0
    for seed in range(seeds):
        try:
            person = client.chat.completions.create(
                model=server.model,
                messages=[{"role": "user", "content": "Invent a person."}],
                response_model=Person,
                max_retries=0,
                temperature=1,
                seed=seed,
                max_tokens=400,
                **more,
            )
        except IncompleteOutputException:
            continue
        assert isinstance(person, Person), person
        n += 1
    return n


def case_tools(server):
    assert people(server, instructor.Mode.TOOLS, 8) == 8


def case_json_schema(server):
    assert people(server, instructor.Mode.JSON_SCHEMA, 8) == 8


def case_json(server):
    # JSON mode allows any object: it comes whole, and need not be a person.
    try:
        people(server, instructor.Mode.JSON, 2)
    except InstructorRetryException as other:
        assert "validation error" in str(other), other


main(globals())

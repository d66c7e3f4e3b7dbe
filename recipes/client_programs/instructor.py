"""instructor: a pydantic class as the answer, by tools and by a schema."""

import instructor
import openai

from recipes.client_programs.person import Person
from recipes.client_programs.steps import CHAT, MODEL, must, told, uses


def main(url: str) -> None:
    """Try it against a server."""
    uses("instructor")
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for mode in (
        instructor.Mode.TOOLS,
        instructor.Mode.TOOLS_STRICT,
        instructor.Mode.JSON,
        instructor.Mode.JSON_SCHEMA,
    ):
        patched = instructor.from_openai(client, mode=mode)
        asked = {"model": MODEL, "messages": [dict(each) for each in CHAT], "max_tokens": 96, "temperature": 0}
        if mode is instructor.Mode.JSON:
            # This mode asks for any JSON, and a small model does not read the schema in the prompt.
            asked["extra_body"] = {"structured_outputs": {"json": Person.model_json_schema()}, "response_format": None}
        person = patched.chat.completions.create(response_model=Person, max_retries=0, **asked)
        must(isinstance(person, Person), f"{mode} gives a person", person)
        told(f"{mode.name} mode", person)

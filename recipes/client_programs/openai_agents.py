"""openai-agents: an agent by responses and by chats, its stream, a tool that it calls, and a pydantic class."""

import asyncio
from typing import Annotated

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import Field

from recipes.client_programs.person import Person
from recipes.client_programs.steps import MODEL, must, told, uses

CALLED: list[int] = []


@function_tool
def count(age: Annotated[int, Field(ge=0, le=99)]) -> str:
    """Counts the years.

    Args:
        age: The years.
    """
    CALLED.append(age)
    return "counted"


async def tried(url: str) -> None:
    """Try it against a server."""
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    question = "Tell me a story about a dog."
    # The client takes an output that is cut off for a failure, so that outputs end with their first sentence.
    short = ModelSettings(max_tokens=96, temperature=0, extra_body={"stop": ["."]})
    longer = ModelSettings(max_tokens=96, temperature=0)
    for kind, model in (
        ("responses", OpenAIResponsesModel(MODEL, client)),
        ("chats", OpenAIChatCompletionsModel(MODEL, client)),
    ):
        agent = Agent(name="teller", instructions="Be short.", model=model, model_settings=short)
        answer = await Runner.run(agent, question)
        must(answer.final_output, f"{kind}: an answer has text", answer)
        told(f"{kind}: answer", answer.final_output)
        streamed = Runner.run_streamed(agent, question)
        events = [event async for event in streamed.stream_events()]
        must(streamed.final_output == answer.final_output, f"{kind}: a stream has the text", streamed.final_output)
        told(f"{kind}: stream", f"{len(events)} events")
        formed = await Runner.run(Agent(name="p", model=model, output_type=Person, model_settings=longer), question)
        must(isinstance(formed.final_output, Person), f"{kind}: a person", formed.final_output)
        told(f"{kind}: structured output", formed.final_output)
        CALLED.clear()
        # A small model goes on calling as long as it may.
        required = ModelSettings(max_tokens=96, temperature=0, tool_choice="required", parallel_tool_calls=False)
        caller = Agent(name="c", model=model, tools=[count], model_settings=required)
        done = await Runner.run(caller, question)
        must(CALLED, f"{kind}: the tool is called", done)
        told(f"{kind}: tool, and the answer to its result", f"count({CALLED[0]})")


def main(url: str) -> None:
    """Try it against a server."""
    uses("openai-agents")
    set_tracing_disabled(True)
    asyncio.run(tried(url))

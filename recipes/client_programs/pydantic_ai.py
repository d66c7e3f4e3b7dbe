"""pydantic-ai: an agent that answers, streams, calls a tool and gives a pydantic class, by chats and by responses."""

import asyncio

from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from recipes.client_programs.person import Person
from recipes.client_programs.steps import MODEL, must, told, uses


async def tried(url: str) -> None:
    """Try it against a server."""
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    question = "Tell me a story about a dog."
    settings = {"max_tokens": 96, "temperature": 0.0}
    for kind, model in (
        ("chats", OpenAIChatModel(MODEL, provider=provider)),
        ("responses", OpenAIResponsesModel(MODEL, provider=provider)),
    ):
        plain = Agent(model, model_settings={**settings, "max_tokens": 24})
        answer = await plain.run(question)
        must(answer.output and answer.usage.output_tokens > 0, f"{kind}: text and usage", answer)
        told(f"{kind}: answer", answer.usage)
        async with plain.run_stream(question) as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True)]
        must("".join(pieces) == answer.output, f"{kind}: a stream has the text", pieces)
        told(f"{kind}: stream")
        for name, output in (("tool", ToolOutput(Person)), ("native", NativeOutput(Person))):
            person = (await Agent(model, output_type=output, retries=0, model_settings=settings).run(question)).output
            must(isinstance(person, Person), f"{kind}: {name} output gives a person", person)
            told(f"{kind}: {name} output", person)


def main(url: str) -> None:
    """Try it against a server."""
    uses("pydantic-ai-slim")
    asyncio.run(tried(url))

"""The `openai` client against a real server: every route, sync, async, streams, and its errors."""

import asyncio
from collections.abc import Iterator

import pytest

from outrider.serve.settings import HttpSettings
from tests.serve.api.test_chat import WEATHER
from tests.serve.served import loaded, serving

openai = pytest.importorskip("openai")
TALK = [{"role": "user", "content": "Tell me a story."}]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with serving(loaded(), HttpSettings(keys=("key",))) as url:
        yield f"{url}/v1"


@pytest.fixture
def client(base: str) -> Iterator["openai.OpenAI"]:
    with openai.OpenAI(base_url=base, api_key="key", max_retries=0) as found:
        yield found


def test_models(client: "openai.OpenAI") -> None:
    assert [each.id for each in client.models.list()] == ["pair", "other-name"]
    assert client.models.retrieve("pair").owned_by == "outrider"


def test_completions_fit_the_clients_types(client: "openai.OpenAI") -> None:
    asked = {"model": "pair", "prompt": "Once", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    found = client.completions.create(**asked)
    openai.types.Completion.model_validate(found.to_dict(), strict=True)
    assert found.usage.total_tokens == found.usage.prompt_tokens + 6
    streamed = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    # Chunks before the last one have no reason of an end, whatever the type says.
    openai.types.Completion.model_validate(streamed[-2].to_dict(), strict=True)
    assert "".join(each.choices[0].text for each in streamed if each.choices) == found.choices[0].text
    assert streamed[-1].usage.completion_tokens == 6


def test_chats_fit_the_clients_types(client: "openai.OpenAI") -> None:
    asked = {"model": "pair", "messages": TALK, "max_completion_tokens": 8, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 2}
    found = client.chat.completions.create(**asked)
    openai.types.chat.ChatCompletion.model_validate(found.to_dict(), strict=True)
    text = ""
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        openai.types.chat.ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == found.choices[0].message.content


def test_tools_and_schemas(client: "openai.OpenAI") -> None:
    asked = {"model": "pair", "messages": TALK, "max_completion_tokens": 150, "seed": 1}
    tools = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    made = client.chat.completions.create(**asked, **tools)
    [call] = made.choices[0].message.tool_calls
    assert call.function.name == "weather"
    with client.chat.completions.stream(**asked, **tools) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    assert '"a"' in client.chat.completions.create(**asked, response_format=form).choices[0].message.content


def test_the_async_client_streams(base: str) -> None:
    async def one(client: "openai.AsyncOpenAI", seed: int) -> str:
        stream = await client.chat.completions.create(
            model="pair",
            messages=TALK,
            max_completion_tokens=10,
            seed=seed,
            stream=True,
            # Draft lengths depend on how many requests run, and drawn texts on draft lengths.
            extra_body={"speculation": {"enabled": False}},
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base, api_key="key", max_retries=0) as client:
            return await asyncio.gather(*(one(client, seed % 4) for seed in range(8)))

    found = asyncio.run(run())
    assert found[:4] == found[4:]
    assert len(set(found)) == 4


def test_errors_have_their_classes(base: str, client: "openai.OpenAI") -> None:
    def ask(own: "openai.OpenAI", **more: object) -> None:
        own.chat.completions.create(**{"model": "pair", "messages": TALK, "max_completion_tokens": 1, **more})

    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        ask(client, model="gpt")
    other = openai.OpenAI(base_url=base, api_key="wrong", max_retries=0)
    with other, pytest.raises(openai.AuthenticationError):
        ask(other)
    with pytest.raises(openai.APIStatusError) as large:
        ask(client, user="a" * 9_000_000)
    assert large.value.status_code == 413


def test_raw_responses_have_the_name_of_the_request(client: "openai.OpenAI") -> None:
    raw = client.completions.with_raw_response.create(
        model="pair", prompt="a", max_tokens=1, extra_headers={"x-request-id": "my-id"}
    )
    assert raw.headers["x-request-id"] == "my-id"
    assert raw.parse().id == "cmpl-my-id"

"""LiteLLM: chats, a stream, a tool call and a schema, by its OpenAI route, and messages by its Anthropic route."""

import json

import litellm

from recipes.client_programs.steps import CHAT, MODEL, PERSON, is_person, must, told, uses


def main(url: str) -> None:
    """Try it against a server."""
    uses("litellm")
    ours = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none", "max_tokens": 24, "temperature": 0}
    whole = litellm.completion(messages=CHAT, **ours)
    text = whole.choices[0].message.content
    must(text and whole.usage.completion_tokens > 0, "a chat has text and usage", whole)
    told("chat", f"{whole.usage.completion_tokens} tokens")

    chunks = list(litellm.completion(messages=CHAT, stream=True, stream_options={"include_usage": True}, **ours))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    must(streamed == text, "a stream has the text of the chat", (streamed, text))
    told("stream", f"{len(chunks)} chunks")

    tool = {"type": "function", "function": {"name": "note", "description": "Notes a person.", "parameters": PERSON}}
    more = {**ours, "max_tokens": 96}
    called = litellm.completion(messages=CHAT, tools=[tool], tool_choice="required", **more)
    [call] = called.choices[0].message.tool_calls[:1]
    must(call.function.name == "note" and is_person(json.loads(call.function.arguments)), "a call fits", called)
    told("tool call", call.function.arguments)
    pieces = list(litellm.completion(messages=CHAT, tools=[tool], tool_choice="required", stream=True, **more))
    rebuilt = litellm.stream_chunk_builder(pieces, messages=CHAT)
    [again] = rebuilt.choices[0].message.tool_calls[:1]
    must(again.function.arguments == call.function.arguments, "a streamed call is the same", again)
    told("streamed tool call")

    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    formed = litellm.completion(messages=CHAT, response_format=form, **more)
    must(is_person(json.loads(formed.choices[0].message.content)), "an output fits its schema", formed)
    told("schema", formed.choices[0].message.content)

    texts = litellm.text_completion(prompt="Once upon a time", **{**ours, "model": f"text-completion-openai/{MODEL}"})
    must(texts.choices[0].text, "a completion has text", texts)
    told("completion")

    anthropic = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": "none", "max_tokens": 24}
    message = litellm.completion(messages=CHAT, temperature=0, **anthropic)
    must(message.choices[0].message.content == text, "messages have the text of the chat", message)
    told("messages, by its Anthropic route")

"""The command-line programs of the packages `openai` and `anthropic`, and the clients that they are made of."""

from typing import Any

import anthropic
import openai

from recipes.client_programs.steps import MODEL, command, must, told, uses

QUESTION = "Tell me a story about a dog."


def main(url: str) -> None:
    """Try them against a server."""
    uses("openai")
    own = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    listed = command("openai", "api", "models.list", **own)
    must(MODEL in listed, "models are listed", listed)
    told("openai api models.list")
    asked = ("-m", MODEL, "-g", "user", QUESTION, "-M", "24", "-t", "0")
    text = command("openai", "api", "chat.completions.create", *asked, **own).strip()
    must(text, "a chat has text", text)
    told("openai api chat.completions.create", text)
    streamed = command("openai", "api", "chat.completions.create", *asked, "--stream", **own).strip()
    must(streamed == text, "a stream has the text of the chat", (streamed, text))
    told("openai api chat.completions.create --stream")
    completed = command("openai", "api", "completions.create", "-m", MODEL, "-p", "Once upon a time", "-M", "16", **own)
    must(completed.strip(), "a completion has text", completed)
    told("openai api completions.create")

    client = anthropic.Anthropic(base_url=url, api_key="none")
    ours: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "messages": [{"role": "user", "content": QUESTION}]}
    message = client.messages.create(extra_body={"temperature": 0}, **ours)
    must(message.content[0].text.strip() == text, "messages have the text of the chat", message)
    told(f"anthropic {anthropic.__version__}: messages", message.usage)
    with client.messages.stream(extra_body={"temperature": 0}, **ours) as stream:
        pieces = "".join(stream.text_stream)
    must(pieces == message.content[0].text, "a stream has the text", pieces)
    counted = client.messages.count_tokens(model=MODEL, messages=ours["messages"]).input_tokens
    must(counted == message.usage.input_tokens + message.usage.cache_read_input_tokens, "tokens are counted", counted)
    told("anthropic: stream, count_tokens", f"{counted} tokens")
    responses = openai.OpenAI(base_url=f"{url}/v1", api_key="none").responses
    must(responses.create(model=MODEL, input=QUESTION, max_output_tokens=24).output_text, "a response has text")
    told("openai: responses")

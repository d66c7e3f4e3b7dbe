"""langchain-openai: chats, streams, tools, schemas, and responses."""

from langchain_openai import ChatOpenAI, OpenAI

from recipes.client_programs.person import Person
from recipes.client_programs.steps import MODEL, must, told, uses


def main(url: str) -> None:
    """Try it against a server."""
    uses("langchain-openai")
    ours = {"model": MODEL, "base_url": f"{url}/v1", "api_key": "none", "temperature": 0, "max_retries": 0}
    question = "Tell me a story about a dog."
    chat = ChatOpenAI(max_tokens=24, **ours)
    answer = chat.invoke(question)
    must(answer.content and answer.usage_metadata["output_tokens"] > 0, "a chat has text and usage", answer)
    told("chat", answer.usage_metadata)
    streamed = "".join(str(chunk.content) for chunk in chat.stream(question))
    must(streamed == answer.content, "a stream has the text of the chat", (streamed, answer.content))
    told("stream")
    longer = ChatOpenAI(max_tokens=96, **ours)
    called = longer.bind_tools([Person], tool_choice="any").invoke(question)
    must(called.tool_calls and Person(**called.tool_calls[0]["args"]), "a call fits", called)
    told("tool call", called.tool_calls[0]["args"])
    for method in ("json_schema", "function_calling"):
        person = longer.with_structured_output(Person, method=method).invoke(question)
        must(isinstance(person, Person), f"{method} gives a person", person)
        told(f"structured output, {method}", person)
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(question)
    must(scored.response_metadata["logprobs"]["content"], "a chat has log-probabilities", scored)
    told("log-probabilities")
    responded = ChatOpenAI(max_tokens=24, use_responses_api=True, **ours).invoke(question)
    must(responded.text == answer.content, "responses have the text of the chat", responded)
    told("responses")
    completed = OpenAI(max_tokens=16, **ours).invoke("Once upon a time")
    must(completed, "a completion has text", completed)
    told("completion")

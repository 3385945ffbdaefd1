"""Sends requests to a server through OpenAI's own client, unchanged.

Runs in the environment that has it. Arguments: address, key. Prints JSON.
"""

import asyncio
import json
import sys
from typing import Any

import openai
from pydantic import BaseModel

URL, KEY = sys.argv[1:3]
MESSAGES: Any = [{"role": "user", "content": "I need a taxi to the airport."}]
GREEDY: Any = {"model": "mini", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
SAMPLED: Any = {"model": "mini", "messages": MESSAGES, "temperature": 0.9, "seed": 7, "max_tokens": 24}
PROMPT: Any = {"model": "mini", "prompt": "The old fisherman", "temperature": 0, "max_tokens": 12}


class Person(BaseModel):
    """The requests to send."""

    age: int
    is_tall: bool


def error_of(call: Any, **fields: Any) -> dict[str, Any]:
    try:
        call(**fields)
    except openai.APIStatusError as error:
        body: Any = error.body
        return {"class": type(error).__name__, "status": error.status_code, "param": body["param"], "code": error.code}
    return {"class": None}


def chats(client: openai.OpenAI) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, fields in (("greedy", GREEDY), ("sampled", SAMPLED)):
        whole = client.chat.completions.create(**fields)
        found[name] = whole.choices[0].message.content
        found["drafter"] = whole.speculation["drafter"]
        found[f"{name} usage"] = whole.usage.model_dump() if whole.usage else None
        parts = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
        chunks = list(parts)
        found[f"{name} streamed"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        found[f"{name} streamed usage"] = chunks[-1].usage.model_dump() if chunks[-1].usage else None
    with client.chat.completions.stream(**GREEDY) as stream:
        found["helper events"] = [event.type for event in stream]
        found["helper"] = stream.get_final_completion().choices[0].message.content
    found["id"] = client.chat.completions.create(**GREEDY)._request_id
    content = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2).choices[0].logprobs
    found["logprobs"] = [one.model_dump() for one in (content.content or [])] if content else None
    parsed = client.chat.completions.parse(**GREEDY | {"max_tokens": 60}, response_format=Person)
    found["parsed"] = parsed.choices[0].message.parsed.model_dump() if parsed.choices[0].message.parsed else None
    found["samples"] = len({choice.message.content for choice in client.chat.completions.create(**SAMPLED, n=3).choices})
    return found


def completions(client: openai.OpenAI) -> dict[str, Any]:
    whole = client.completions.create(**PROMPT, logprobs=2, echo=True)
    streamed = client.completions.create(**PROMPT, stream=True)
    return {
        "text": client.completions.create(**PROMPT).choices[0].text,
        "streamed": "".join(chunk.choices[0].text for chunk in streamed),
        "echoed": whole.choices[0].text,
        "tokens": whole.choices[0].logprobs.tokens if whole.choices[0].logprobs else None,
    }


def errors(client: openai.OpenAI) -> dict[str, Any]:
    create = client.chat.completions.create
    stranger = client.with_options(api_key="another-key-than-the-servers", max_retries=0)
    return {
        "key": error_of(stranger.chat.completions.create, **GREEDY),
        "model": error_of(create, **GREEDY | {"model": "gpt-5"}),
        "field": error_of(create, **GREEDY | {"temperature": -1}),
        "unknown": error_of(create, **GREEDY, extra_body={"temperatur": 1}),
        "long": error_of(create, **GREEDY | {"messages": [{"role": "user", "content": "a " * 5000}]}),
        "streamed": error_of(create, **GREEDY | {"top_p": 2}, stream=True),
        "path": error_of(client.embeddings.create, model="mini", input="a"),
    }


async def together() -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(**SAMPLED | {"seed": seed}) for seed in range(4)))
        return [answer.choices[0].message.content for answer in answers]


def busy(client: openai.OpenAI) -> dict[str, Any]:
    """What a full server answers: its one place is taken by a stream."""
    endless = client.chat.completions.create(**GREEDY | {"max_tokens": 1900}, stream=True, extra_body={"ignore_eos": True})
    next(iter(endless))
    refused = error_of(client.with_options(max_retries=0).chat.completions.create, **GREEDY)
    endless.close()
    return {**refused, "retried": client.with_options(max_retries=8).chat.completions.create(**GREEDY).choices[0].message.content}


def main() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY)
    if sys.argv[3:] == ["busy"]:
        sys.stdout.write(json.dumps(busy(client)) + "\n")
        return
    found = {"chats": chats(client), "completions": completions(client), "errors": errors(client), "together": asyncio.run(together())}
    found["models"] = [[model.id for model in client.models.list()], client.models.retrieve("mini").id]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

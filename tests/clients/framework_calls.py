"""Sends requests to a server through litellm and langchain-openai.

Runs in the environment that has them. Arguments: address, key. Prints JSON.
"""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one

import litellm
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

URL, KEY = sys.argv[1:3]
QUESTION = "I need a taxi to the airport."
MESSAGES = [{"role": "user", "content": QUESTION}]


class Person(BaseModel):
    """The requests to send."""

    age: int


def of_litellm() -> dict[str, Any]:
    given: Any = {"api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 24}
    whole: Any = litellm.completion("openai/mini", MESSAGES, **given)
    streamed: Any = litellm.completion("openai/mini", MESSAGES, stream=True, **given)
    found = {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in streamed),
        "usage": whole.usage.completion_tokens,
    }
    text: Any = litellm.text_completion(prompt="The old fisherman", model="text-completion-openai/mini", **given | {"max_tokens": 12})
    found["text"] = text.choices[0].text
    try:
        litellm.completion("openai/other", MESSAGES, **given)
    except litellm.exceptions.NotFoundError as error:
        found["error"] = type(error).__name__
    return found


def of_langchain() -> dict[str, Any]:
    chat = ChatOpenAI(model="mini", base_url=URL, api_key=KEY, temperature=0, max_tokens=24)
    answers = chat.batch([QUESTION, "Hello", QUESTION])
    return {
        "whole": chat.invoke(QUESTION).content,
        "streamed": "".join(str(chunk.content) for chunk in chat.stream(QUESTION)),
        "batch": [answer.content for answer in answers],
        "usage": answers[0].usage_metadata["output_tokens"],
        "parsed": chat.with_structured_output(Person, method="json_schema").invoke(QUESTION).age,
        "text": OpenAI(model="mini", base_url=URL, api_key=KEY, temperature=0, max_tokens=12).invoke("The old fisherman"),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps({"litellm": of_litellm(), "langchain": of_langchain()}) + "\n")

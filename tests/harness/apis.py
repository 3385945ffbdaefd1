"""The server's APIs for tests: how a chat request is made, and how the answer is read."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from harness.http_client import HttpClient, events_in

Object = dict[str, Any]
Said = list[tuple[str, ...]]
"""("text", …), ("thought", …) or ("call", name, JSON of the arguments) in the order written."""


class Spoken(ABC):
    """One API."""

    path: str
    names: ClassVar[Mapping[str, str]] = {}  # of fields that are called otherwise

    def fields(self, messages: Sequence[Object], **sampling: Any) -> Object:
        """The body of a request."""
        return {"model": "mini", "messages": list(messages), **{self.names.get(name, name): value for name, value in sampling.items()}}

    def whole(self, client: HttpClient, fields: Object) -> Object:
        """An answer that is not streamed."""
        return client.json(self.path, {**fields, "stream": False})

    def stream(self, client: HttpClient, fields: Object) -> list[Object]:
        """The events of one that is."""
        answer = client.post(self.path, {**fields, "stream": True})
        assert answer.status_code == 200, answer.text
        return self.events(answer.text)

    def events(self, text: str) -> list[Object]:
        """The events in a stream's text."""
        assert text.endswith("\n\n")
        found = []
        for event in text.removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    @abstractmethod
    def said(self, answer: Object) -> Said:
        """The contents of a complete answer."""

    @abstractmethod
    def streamed(self, events: Sequence[Object]) -> Said:
        """The contents of a stream."""

    @abstractmethod
    def ending(self, answer: Object) -> tuple[Any, ...]:
        """Why a whole answer ended, and its tokens: of the prompt and its own."""

    @abstractmethod
    def streamed_ending(self, events: Sequence[Object]) -> tuple[Any, ...]:
        """The same of a stream."""

    @abstractmethod
    def message_of(self, error: Object) -> str:
        """The text of an error, whose shape is checked."""

    def speculation(self, answer: Object | Sequence[Object]) -> Object:
        """What speculation did, of a whole answer or a stream."""
        found: Object = (answer if isinstance(answer, dict) else self.last(answer))["speculation"]
        return found

    def last(self, events: Sequence[Object]) -> Object:
        """The object of a stream that sums it up."""
        return events[-1]


def joined(pieces: Sequence[tuple[str, str]]) -> Said:
    """Pieces of text and reasoning; consecutive pieces of one kind are joined."""
    found: Said = []
    for kind, text in pieces:
        if found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + text)
        else:
            found.append((kind, text))
    return found


class Chat(Spoken):
    """`/v1/chat/completions`."""

    path = "/v1/chat/completions"

    def stream(self, client: HttpClient, fields: Object) -> list[Object]:
        return super().stream(client, {**fields, "stream_options": {"include_usage": True}})

    def events(self, text: str) -> list[Object]:
        return events_in(text)

    def said(self, answer: Object) -> Said:
        message = answer["choices"][0]["message"]
        found: Said = [("thought", message["reasoning_content"])] if message.get("reasoning_content") else []
        found += [("text", message["content"])] if message["content"] else []
        return found + [("call", call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]

    def streamed(self, events: Sequence[Object]) -> Said:
        pieces, calls = [], list[list[str]]()
        for delta in (choice["delta"] for event in events for choice in event["choices"]):
            pieces += [("thought", delta["reasoning_content"])] if delta.get("reasoning_content") else []
            pieces += [("text", delta["content"])] if delta.get("content") else []
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"].get("arguments", "")
        return joined(pieces) + [("call", *call) for call in calls]

    def ending(self, answer: Object) -> tuple[Any, ...]:
        usage = answer["usage"]
        return answer["choices"][0]["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"]

    def streamed_ending(self, events: Sequence[Object]) -> tuple[Any, ...]:
        return self.ending({**events[-1], "choices": events[-2]["choices"]})

    def message_of(self, error: Object) -> str:
        assert set(error["error"]) == {"message", "type", "param", "code"}
        return str(error["error"]["message"])


class Messages(Spoken):
    """Anthropic's `/v1/messages`."""

    path = "/v1/messages"
    names: ClassVar[Mapping[str, str]] = {"stop": "stop_sequences"}

    def said(self, answer: Object) -> Said:
        found: Said = []
        for block in answer["content"]:
            if block["type"] == "tool_use":
                found.append(("call", block["name"], json.dumps(block["input"])))
            else:
                found.append(("text", block["text"]) if block["type"] == "text" else ("thought", block["thinking"]))
        return found

    def streamed(self, events: Sequence[Object]) -> Said:
        blocks: list[Object] = []
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta, block = event["delta"], blocks[-1]
                assert event["index"] == len(blocks) - 1
                for kind, text, target in (
                    ("text_delta", "text", "text"),
                    ("thinking_delta", "thinking", "thinking"),
                    ("input_json_delta", "partial_json", "json"),
                ):
                    if delta["type"] == kind:
                        block[target] += delta[text]
        for block in blocks:
            if block["json"]:
                block["input"] = json.loads(block["json"])
        return self.said({"content": blocks})

    def ending(self, answer: Object) -> tuple[Any, ...]:
        usage = answer["usage"]
        prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
        return (answer["stop_reason"], answer["stop_sequence"]), prompt, usage["output_tokens"]

    def streamed_ending(self, events: Sequence[Object]) -> tuple[Any, ...]:
        start, delta = events[0]["message"], events[-2]
        ended = self.ending({**delta["delta"], "usage": delta["usage"]})
        assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == ended[1]
        return ended

    def message_of(self, error: Object) -> str:
        assert set(error) == {"type", "error"}
        assert error["type"] == "error"
        assert set(error["error"]) == {"type", "message"}
        return str(error["error"]["message"])

    def last(self, events: Sequence[Object]) -> Object:
        return events[-2]


class Responses(Chat):
    """OpenAI's `/v1/responses`."""

    path = "/v1/responses"
    names: ClassVar[Mapping[str, str]] = {"max_tokens": "max_output_tokens"}

    def fields(self, messages: Sequence[Object], **sampling: Any) -> Object:
        fields = super().fields(messages, **sampling)
        given = fields.pop("messages")
        return {**fields, "input": given}

    def stream(self, client: HttpClient, fields: Object) -> list[Object]:
        events = Spoken.stream(self, client, fields)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        return events

    def events(self, text: str) -> list[Object]:
        return Spoken.events(self, text)

    def said(self, answer: Object) -> Said:
        found: Said = []
        for item in answer["output"]:
            if item["type"] == "function_call":
                found.append(("call", item["name"], item["arguments"]))
            else:
                found.append(("text" if item["type"] == "message" else "thought", item["content"][0]["text"]))
        return found

    def streamed(self, events: Sequence[Object]) -> Said:
        items: list[Object] = []
        for event in events:
            kind = event["type"]
            if kind == "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append({**event["item"], "text": ""})
            elif kind.endswith(".delta"):
                assert (event["output_index"], event["item_id"]) == (len(items) - 1, items[-1]["id"])
                items[-1]["text"] += event["delta"]
            elif kind == "response.output_item.done":
                assert (event["item"]["id"], event["item"]["type"]) == (items[-1]["id"], items[-1]["type"])
        kinds = {"message": "text", "reasoning": "thought"}
        return [
            ("call", item["name"], item["text"]) if item["type"] == "function_call" else (kinds[item["type"]], item["text"])
            for item in items
        ]

    def ending(self, answer: Object) -> tuple[Any, ...]:
        usage, cut = answer["usage"], answer["incomplete_details"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return (answer["status"], cut and cut["reason"]), usage["input_tokens"], usage["output_tokens"]

    def streamed_ending(self, events: Sequence[Object]) -> tuple[Any, ...]:
        response = events[-1]["response"]
        assert events[-1]["type"] == f"response.{response['status']}"
        assert self.said(response) == self.streamed(events)
        return self.ending(response)

    def last(self, events: Sequence[Object]) -> Object:
        response: Object = events[-1]["response"]
        return response


class OllamaChat(Spoken):
    """Ollama's `/api/chat`."""

    path = "/api/chat"
    names: ClassVar[Mapping[str, str]] = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}

    def fields(self, messages: Sequence[Object], **sampling: Any) -> Object:
        fields = super().fields(messages, **sampling)
        given = {"model", "messages", "tools", "speculation", "format", "think"}
        options = {"top_k": 0, "top_p": 1.0, **{name: fields.pop(name) for name in list(fields) if name not in given}}
        return {**fields, "options": options}

    def events(self, text: str) -> list[Object]:
        assert text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]

    def said(self, answer: Object) -> Said:
        message = answer["message"]
        assert message["role"] == "assistant"
        found: Said = [("thought", message["thinking"])] if message.get("thinking") else []
        found += [("text", message["content"])] if message["content"] else []
        calls = [call["function"] for call in message.get("tool_calls", ())]
        return found + [("call", call["name"], json.dumps(call["arguments"])) for call in calls]

    def streamed(self, events: Sequence[Object]) -> Said:
        assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
        pieces = [piece for event in events for piece in self.said(event)]
        return joined([piece for piece in pieces if len(piece) == 2]) + [piece for piece in pieces if len(piece) == 3]

    def ending(self, answer: Object) -> tuple[Any, ...]:
        assert answer["done"]
        assert answer["total_duration"] >= answer["eval_duration"] >= 0
        return answer["done_reason"], answer["prompt_eval_count"], answer["eval_count"]

    def streamed_ending(self, events: Sequence[Object]) -> tuple[Any, ...]:
        return self.ending(events[-1])

    def message_of(self, error: Object) -> str:
        assert set(error) == {"error"}
        assert isinstance(error["error"], str)
        return error["error"]


APIS: dict[str, Spoken] = {"chat": Chat(), "messages": Messages(), "responses": Responses(), "ollama": OllamaChat()}

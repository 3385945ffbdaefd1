"""Ollama's answers: objects, the last of which is done, each on a line of its own in a stream."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol

from paceline.outputs import RequestOutput
from paceline.parsing.events import Answer, Event, Finished, Reasoning, Step, Text, ToolCall, ToolCallArguments, ToolCallStart
from paceline.sampling.logprobs import TokenLogprobs
from paceline.server.answering import speculation_of
from paceline.server.framing import line
from paceline.server.ollama.fields import RequestFields
from paceline.server.token_texts import LEAST_LOGPROB, TokenTexts

_NO_MESSAGE = {"role": "assistant", "content": ""}


class Talk(Protocol):
    """Who has a request answered: the dialogue, or a text that goes on."""

    async def collect(self) -> list[Answer]:
        """The whole answers."""

    def stream(self) -> AsyncGenerator[Step, None]:
        """What every step adds."""


@dataclass(frozen=True, slots=True)
class OllamaAnswer:
    """One request, and how it is answered.

    Attributes:
        model: as the request asks for it.
        is_chat: whether texts stand in a message, or in `response`.
    """

    model: str
    fields: RequestFields
    texts: TokenTexts
    talk: Talk
    is_chat: bool

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        (answer,) = await self.talk.collect()
        more = {"thinking": answer.reasoning} if answer.reasoning else {}
        calls = [found for call in answer.tool_calls if (found := _call(call)) is not None]
        said = self._said(answer.text, **more, **({"tool_calls": calls} if calls else {}))
        return {**said, **self._logprobs(answer.output.logprobs or []), **self._ending(answer.output, answer.finish_reason)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as lines: what is said bit by bit, calls once they are complete, then how it ended."""
        calls = _Calls()
        async with aclosing(self.talk.stream()) as stream:
            async for step in stream:
                for fields in self._lines(step, calls):
                    yield line(fields)

    def _lines(self, step: Step, calls: "_Calls") -> Iterator[dict[str, Any]]:
        """What is to be sent of a step; the first line has the log-probabilities of its tokens."""
        more = self._logprobs(step.chunk.logprobs)
        for event in step.events:
            if (call := calls.completed(event)) is not None:
                yield {**self._said("", tool_calls=[call]), "done": False, **more}
                more = {}
            if isinstance(event, Text | Reasoning):
                is_text = isinstance(event, Text)
                yield {**(self._said(event.text) if is_text else self._said("", thinking=event.text)), "done": False, **more}
                more = {}
            elif isinstance(event, Finished):
                yield {**self._said(""), **more, **self._ending(event.output, event.finish_reason)}
                more = {}
        if more:
            yield {**self._said(""), "done": False, **more}

    def _said(self, text: str, **more: Any) -> dict[str, Any]:
        fields = head(self.model)
        return {**fields, "message": {**_NO_MESSAGE, "content": text, **more}} if self.is_chat else {**fields, "response": text, **more}

    def _ending(self, output: RequestOutput, finish_reason: str) -> dict[str, Any]:
        timing, usage = output.timing, output.usage
        return {
            "done": True,
            "done_reason": "length" if finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(timing.total_s),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(timing.prompt_s),
            "eval_count": usage.completion_tokens,
            "eval_duration": _nanoseconds(timing.decode_s),
            "speculation": speculation_of([output], shows_origins=self.fields.shows_origins),
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if not self.fields.logprobs or not logprobs:
            return {}
        found = [
            {**self._token(one.token_id, one.logprob), "top_logprobs": [self._token(token_id, value) for token_id, value in one.top]}
            for one in logprobs
        ]
        return {"logprobs": found}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self.texts.bytes_of(token_id)
        return {"token": spelled.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(spelled)}


class _Calls:
    """Collects calls, which are told when they are complete."""

    def __init__(self) -> None:
        self._open: ToolCall | None = None

    def completed(self, event: Event) -> dict[str, Any] | None:
        """The call that an event ends, if it ends one that is whole."""
        if isinstance(event, ToolCallArguments):
            assert self._open is not None
            self._open = replace(self._open, arguments=self._open.arguments + event.json)
            return None
        ended, self._open = self._open, ToolCall(event.id, event.name) if isinstance(event, ToolCallStart) else None
        return None if ended is None else _call(ended)


def head(model: str) -> dict[str, Any]:
    """The fields that every object begins with.

    Args:
        model: as the request asks for it.
    """
    return {"model": model, "created_at": now()}


def now() -> str:
    """The time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(call: ToolCall) -> dict[str, Any] | None:
    """A call; None where the answer broke off within it, which `done_reason` says."""
    found = call.parsed()
    return None if found is None else {"id": call.id, "function": {"name": call.name, "arguments": found}}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)

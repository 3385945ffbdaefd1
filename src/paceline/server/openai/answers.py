"""What the answers of OpenAI's dialects have in common: events, usage, log-probabilities, statistics."""

import json
import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.logprobs import TokenLogprobs
from paceline.server.client_watch import EventStream, unless_gone
from paceline.server.http_errors import http_error_of
from paceline.server.service import Service
from paceline.speculation.request import TokenOrigin
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step_record import StepRecord
from paceline.tokenizer.tokenizer import Tokenizer
from paceline.tokenizer.vocabulary import piece_bytes, pieces_of

LEAST_LOGPROB = -9999.0  # OpenAI's, for what cannot be drawn: JSON has no infinity
DONE = b"data: [DONE]\n\n"


def event(fields: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def head(service: Service, kind: str, prefix: str) -> dict[str, Any]:
    """The fields that an answer, or every chunk of one, begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": service.model,
        "system_fingerprint": service.fingerprint,
    }


async def stream_of(request: Request, events: AsyncGenerator[bytes, None]) -> Response:
    """An answer that streams `events`. What fails before the first one is raised; later it is an event, the last one."""
    first = await unless_gone(request, _next(events))

    async def all_of_them() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            yield first
            try:
                async for one in events:
                    yield one
            except Exception as error:
                yield event(http_error_of(error).as_dict())

    return EventStream(all_of_them())


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about our parameters in this block are about the dialect's fields."""
    try:
        yield
    except RequestError as error:
        name = error.parameter
        raise RequestError(str(error), parameter=names.get(name, name) if name else None, code=error.code) from error


def usage_of(outputs: Sequence[RequestOutput], *, counts_output: bool = True) -> dict[str, Any]:
    """Token counts of a request; a prompt counts once, however many samples it has."""
    first = [output.usage for output in outputs if output.sample_index == 0]
    num_prompt = sum(one.prompt_tokens for one in first)
    num_output = sum(output.usage.completion_tokens for output in outputs) if counts_output else 0
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in first)},
    }


def speculation_of(outputs: Sequence[RequestOutput], *, shows_origins: bool, texts: "TokenTexts | None" = None) -> dict[str, Any]:
    """What speculation did for a request; on demand the ids of each output, where they came from, and what steps guessed if it was kept.

    Args:
        texts: spells the ids; None = they are not spelled.
    """
    total = SpeculationStats(acceptance=outputs[0].speculation.acceptance)
    for output in outputs:
        total.add(output.speculation)
    slowest = max((output.timing for output in outputs), key=lambda timing: timing.total_s)
    answer = {"drafter": outputs[0].drafter, "numerics": outputs[0].numerics, "seed": outputs[0].seed, **total.as_dict()}
    answer["timing"] = {"prompt_s": round(slowest.prompt_s, 6), "decode_s": round(slowest.decode_s, 6)}
    if shows_origins:
        shown = [_origins(output.token_ids, output.origins, output.steps, texts) for output in outputs]
        answer |= {name: [one[name] for one in shown] for name in shown[0]}
    return answer


def chunk_origins(chunk: StreamChunk, texts: "TokenTexts | None" = None) -> dict[str, Any]:
    """The same of one chunk of a stream."""
    return {"speculation": _origins(chunk.token_ids, chunk.origins, chunk.steps or None, texts)}


def _origins(
    token_ids: Sequence[int], origins: Sequence[TokenOrigin], steps: Sequence[StepRecord] | None, texts: "TokenTexts | None"
) -> dict[str, Any]:
    """Tokens and who guessed them; and the steps that emitted them, if they were kept."""
    shown: dict[str, Any] = {"token_ids": list(token_ids), "origins": [origin.value for origin in origins]}
    if steps is not None:
        shown["trees"] = [step.as_dict() for step in steps]
    if texts is not None:
        shown["texts"] = [texts.text_of(token_id) for token_id in token_ids]
        for tree in shown.get("trees", ()):
            tree["draft_texts"] = [texts.text_of(token_id) for token_id in tree["draft_token_ids"]]
    return shown


class TokenTexts:
    """How tokens are spelled in log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _bytes(self) -> list[bytes]:
        return piece_bytes(pieces_of(self._tokenizer))

    def bytes_of(self, token_id: int) -> bytes:
        """Its bytes; none for ids that are no token."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def text_of(self, token_id: int) -> str:
        """Its text; of a part of a character OpenAI's spelling of the bytes."""
        spelled = self.bytes_of(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of several, special ones included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def chat_content(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The `logprobs` of a chat's choice."""
        content = [
            {
                **self._chat_token(one.token_id, one.logprob),
                "top_logprobs": [self._chat_token(token_id, logprob) for token_id, logprob in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _chat_token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self.bytes_of(token_id)
        return {"token": spelled.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(spelled)}

    def completion_lists(self, logprobs: Sequence[TokenLogprobs | None], ids: Sequence[int], start: int) -> dict[str, Any]:
        """The `logprobs` of a completion's choice.

        Args:
            logprobs: None for a first token, which nothing predicts.
            ids: the tokens.
            start: characters in front of the first one.
        """
        texts = [self.text_of(token_id) for token_id in ids]
        offsets = [start]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [None if one is None else max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [None if one is None else self._best(one) for one in logprobs],
            "text_offset": offsets[:-1],
        }

    def _best(self, one: TokenLogprobs) -> dict[str, float]:
        """The best tokens and the token itself; of two that are spelled alike the better one."""
        found: dict[str, float] = {}
        for token_id, logprob in (*one.top, (one.token_id, one.logprob)):
            found.setdefault(self.text_of(token_id), max(logprob, LEAST_LOGPROB))
        return found

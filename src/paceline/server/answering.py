"""What the answers of all dialects have in common: whole or streamed, their errors, and what speculation did for them."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import CapacityError, RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.server.dialects import dialect_of
from paceline.server.disconnect import EventStream, cancel_on_disconnect
from paceline.server.framing import as_json
from paceline.server.http_errors import HttpError, http_error_of
from paceline.server.token_texts import TokenTexts
from paceline.speculation.request import TokenOrigin
from paceline.speculation.stats import SpeculationStats
from paceline.speculation.step_record import StepRecord


class Answering(Protocol):
    """One request, and how it is answered."""

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, as they are sent."""


async def answered(request: Request, one: Answering, *, is_streamed: bool | None) -> Response:
    """An answer, whole or streamed. Of a stream, what fails before the first event is raised; later it is an event, the last one."""
    if not is_streamed:
        return Response(as_json(await cancel_on_disconnect(request, one.whole())), media_type="application/json")
    events, dialect = one.events(), dialect_of(request.url.path)
    first = await cancel_on_disconnect(request, _next(events))

    async def all_of_them() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            yield first
            try:
                async for event in events:
                    yield event
            except Exception as error:
                yield dialect.error_event(http_error_of(error))

    return EventStream(all_of_them(), dialect.media_type)


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    return await anext(events)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about our parameters in this block are about the dialect's fields.

    Args:
        names: of the fields, by the parameters'; "messages[" stands for all that is within a message.

    Raises:
        HttpError: one was raised.
    """
    try:
        yield
    except (RequestError, CapacityError, HttpError) as error:
        found = http_error_of(error)
        ours = found.parameter or ""
        if ours in names:
            found.parameter = names[ours]
            if found.message.startswith((f"{ours}:", f"{ours} ")):
                found.message = names[ours] + found.message.removeprefix(ours)
        elif "messages[" in names and ours.startswith("messages["):
            found.parameter = names["messages["]
        raise found from (None if found is error else error)


def speculation_of(outputs: Sequence[RequestOutput], *, shows_origins: bool, texts: TokenTexts | None = None) -> dict[str, Any]:
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


def chunk_origins(chunk: StreamChunk, texts: TokenTexts | None = None) -> dict[str, Any]:
    """The same of one chunk of a stream."""
    return {"speculation": _origins(chunk.token_ids, chunk.origins, chunk.steps or None, texts)}


def _origins(
    token_ids: Sequence[int], origins: Sequence[TokenOrigin], steps: Sequence[StepRecord] | None, texts: TokenTexts | None
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

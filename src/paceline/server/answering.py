"""From a body to an answer, in every API: read it, build the answer, send it whole or streamed."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import CONTEXT_LENGTH_EXCEEDED, CapacityError, RequestError
from paceline.outputs import RequestOutput, StreamChunk
from paceline.server.apis import api_of
from paceline.server.disconnect import EventStream, cancel_on_disconnect
from paceline.server.errors import HttpError, http_error_of
from paceline.server.fields import MAX_INLINE_BYTES, Fields, Read, read_body, report_ignored
from paceline.server.framing import large_json
from paceline.server.middleware import AT_END, MODEL_NAME
from paceline.server.model_pool import ModelPool
from paceline.server.service import Service
from paceline.server.token_texts import TokenTexts
from paceline.speculation.request import TokenOrigin
from paceline.speculation.stats import SpeculationStats, StepRecord


class Answering(Protocol):
    """One request, ready to be answered."""

    async def collect(self) -> Any:
        """Generate all outputs."""

    def whole(self, collected: Any, /) -> dict[str, Any]:
        """The answer as one object, from what `collect` returned. Log-probabilities take time: call it in a thread."""

    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events, encoded."""


def add_answer_route(
    router: APIRouter,
    pool: ModelPool,
    path: str,
    kind: type[Read],
    build: Callable[[Service, Read], Answering | Response],
    answer_unloaded: Callable[[ModelPool, Read], Response | None] = lambda *_: None,
) -> None:
    """Add a route whose requests generate an answer, whole or streamed.

    What fails before a stream's first event has a status of its own; what fails later is the stream's last event.

    Args:
        path: if it begins with /v1, it is also served without that.
        kind: of the body's fields.
        build: checks the fields and makes the answer of them, or a finished response. Its name and docstring describe the route.
        answer_unloaded: answers a request that needs no loaded model; returns None where one is needed.
    """

    async def answer_request(request: Request) -> Response:
        fields, is_slow = await _read(request, pool, kind)
        with named(fields.parameter_names()):
            answer: Answering | Response | None = answer_unloaded(pool, fields)
            if answer is None:
                service = await _service_of(request, pool, fields)
                answer = await asyncio.to_thread(build, service, fields) if is_slow else build(service, fields)
            headers = report_ignored(fields.ignored, pool.logged_fields)
            if not isinstance(answer, Response):
                answer = await (_streamed(request, answer) if fields.is_streamed else _whole(request, answer))
        answer.headers.update(headers)
        return answer

    _add_route(router, path, kind, build, answer_request)


def add_json_route(
    router: APIRouter, pool: ModelPool, path: str, kind: type[Read], compute: Callable[[Service, Read], Mapping[str, Any]]
) -> None:
    """Add a route whose requests generate nothing.

    Args:
        path, kind: as for `add_answer_route`.
        compute: the answer's object. Slow: called in a thread. Its name and docstring describe the route.
    """

    async def answer_request(request: Request) -> Response:
        fields, _ = await _read(request, pool, kind)
        with named(fields.parameter_names()):
            service = await _service_of(request, pool, fields)
            with pool.admission.admitted(0):
                body = await asyncio.to_thread(lambda: large_json(compute(service, fields)))
        return Response(body, media_type="application/json", headers=report_ignored(fields.ignored, pool.logged_fields))

    _add_route(router, path, kind, compute, answer_request)


def _add_route(
    router: APIRouter, path: str, kind: type[Fields], described: Callable[..., Any], answer: Callable[[Request], Awaitable[Response]]
) -> None:
    about: dict[str, Any] = {"methods": ["POST"], "name": described.__name__, "description": described.__doc__}
    router.add_api_route(path, answer, openapi_extra=request_schema(kind), **about)
    if path.startswith("/v1/"):
        router.add_api_route(path.removeprefix("/v1"), answer, include_in_schema=False, **about)


async def read_request(request: Request, pool: ModelPool, kind: type[Read]) -> Read:
    """Return the fields of a request whose answer needs no loaded model."""
    return (await _read(request, pool, kind))[0]


async def _read(request: Request, pool: ModelPool, kind: type[Read]) -> tuple[Read, bool]:
    """Return the fields, and whether the body is so large that processing it would block the event loop."""
    content = await request.body()
    is_slow = len(content) > MAX_INLINE_BYTES
    read = partial(read_body, kind, content, pool.settings)
    return await asyncio.to_thread(read) if is_slow else read(), is_slow


async def _service_of(request: Request, pool: ModelPool, fields: Fields) -> Service:
    """Return what answers a request; its model stays loaded until the request has ended."""
    model, at_end, keep_s = pool.find(getattr(fields, "model", None)), request.scope[AT_END], fields.keep_s
    request.scope[MODEL_NAME] = model.name
    if keep_s is not None and not pool.unloads:
        fields.ignore("keep_alive")
        keep_s = None
    service = pool.take_loaded(model, at_end)
    if service is None:
        began_s = time.monotonic()
        service = await cancel_on_disconnect(request, pool.wait(model, at_end))
        fields.record_loading(time.monotonic() - began_s)
    model.keep_s = pool.settings.unload_after_s if keep_s is None else keep_s
    return service


async def _whole(request: Request, answer: Answering) -> Response:
    collected = await cancel_on_disconnect(request, answer.collect())
    body = await asyncio.to_thread(lambda: large_json(answer.whole(collected)))
    return Response(body, media_type="application/json")


async def _streamed(request: Request, answer: Answering) -> Response:
    events = answer.events()
    first = await cancel_on_disconnect(request, anext(events))
    return EventStream(first, events, api_of(request.url.path))


@cache  # making them takes most of the time that an application takes to be made
def request_schema(kind: type[Fields]) -> dict[str, Any]:
    """Describe a route whose body has these fields, for /openapi.json; every application of a process shares it."""
    schema = {"$id": f"urn:paceline:{kind.__name__}", **kind.model_json_schema()}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about our parameters in this block become errors about the API's fields.

    Args:
        names: of the fields, by the parameters'; "messages[" is everything within a message.

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
            if found.code != CONTEXT_LENGTH_EXCEEDED and found.message.startswith((f"{ours}:", f"{ours} ")):
                found.message = names[ours] + found.message.removeprefix(ours)
        elif "messages[" in names and ours.startswith("messages["):
            found.parameter = names["messages["]
        raise found from (None if found is error else error)


def speculation_of(outputs: Sequence[RequestOutput], *, shows_origins: bool, texts: TokenTexts | None = None) -> dict[str, Any]:
    """Statistics of a request's speculation; on request also token ids, their origins, and the drafts of each step if they were kept.

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
    return {"speculation": _origins(chunk.token_ids, chunk.origins, chunk.steps or None, texts)}


def _origins(
    token_ids: Sequence[int], origins: Sequence[TokenOrigin], steps: Sequence[StepRecord] | None, texts: TokenTexts | None
) -> dict[str, Any]:
    """Tokens and their origins, and the steps that emitted them, if they were kept."""
    shown: dict[str, Any] = {"token_ids": list(token_ids), "origins": [origin.value for origin in origins]}
    if steps is not None:
        shown["trees"] = [step.as_dict() for step in steps]
    if texts is not None:
        shown["texts"] = [texts.text_of(token_id) for token_id in token_ids]
        for tree in shown.get("trees", ()):
            tree["draft_texts"] = [texts.text_of(token_id) for token_id in tree["draft_token_ids"]]
    return shown

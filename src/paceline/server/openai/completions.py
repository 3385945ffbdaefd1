"""`/v1/completions`."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from paceline.outputs import RequestOutput, StreamChunk
from paceline.sampling.params import MAX_INT
from paceline.server.answering import answered, chunk_origins, named, speculation_of
from paceline.server.framing import data_event
from paceline.server.generation import GenerationRequest
from paceline.server.http_errors import HttpError
from paceline.server.json_body import JsonRoute
from paceline.server.limits import check_length
from paceline.server.openai.answers import DONE, head, usage_of
from paceline.server.openai.fields import TextFields
from paceline.server.openai.response_format import response_grammar
from paceline.server.parameters import check_prediction, check_range, request_options, sampling_params
from paceline.server.service import Service
from paceline.server.token_texts import TokenTexts

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFields(TextFields):
    """The body of `/v1/completions`."""

    refused: ClassVar[Mapping[str, str]] = {"suffix": "the model continues a text, it fills no gap"}

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None
    prediction: str | None = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        if self.best_of not in (None, self.n or 1):
            raise HttpError(400, "best_of is not served: ask for n samples and choose", parameter="best_of", code="unsupported_parameter")

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if is_one else given


def completion_routes(service: Service) -> APIRouter:
    """The route of completions."""
    router = APIRouter(route_class=JsonRoute, tags=["openai"])
    texts = TokenTexts(service.engine.opened.maker.tokenizer)

    @router.post("/v1/completions")
    async def completions(fields: CompletionFields, request: Request) -> Response:
        """Continue a text, or several."""
        adapter = service.adapter_of(fields.model)
        fields.check_refused()
        with named({"grammar": "response_format", "prompt_logprobs": "logprobs", "prompt_token_ids": "prompt", "adapter": "model"}):
            one = _Completion(service, fields, texts, _job(fields, service, adapter))
            return await answered(request, one, is_streamed=fields.stream)

    return router


def _job(fields: CompletionFields, service: Service, adapter: str | None) -> GenerationRequest:
    prompts, settings = fields.prompts, service.settings
    if not 1 <= len(prompts) <= settings.max_prompts:
        text = f"prompt holds {len(prompts)} prompts: send 1 to {settings.max_prompts}"
        raise HttpError(400, text, parameter="prompt", code="invalid_value")
    check_length("prompt", sum(map(len, prompts)), settings)
    limit = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    check_range("max_tokens", limit, 0, MAX_INT)
    check_prediction(fields.prediction, is_read=service.reads_predictions)
    of_prompt = fields.logprobs if fields.echo else None
    params = sampling_params(
        fields,
        settings,
        max_tokens=limit or 1,  # a pass over the prompt always ends with a token: of 0 wanted it is not shown
        n=fields.n,
        stop=fields.stop,
        grammar=response_grammar(fields.response_format, settings),
        logprobs=fields.logprobs,
        prompt_logprobs=of_prompt,
    )
    return GenerationRequest(
        prompt_ids=lambda maker: [maker.prompt_ids(prompt) for prompt in prompts],
        num_prompts=len(prompts),
        params=params,
        options=request_options(fields, fields.prediction, adapter=adapter),
    )


@dataclass(frozen=True, slots=True)
class _Completion:
    """One request, and how it is answered."""

    service: Service
    fields: CompletionFields
    texts: TokenTexts
    job: GenerationRequest

    async def whole(self) -> dict[str, Any]:
        """The answer as one object."""
        outputs = await self.service.generation.collect(self.job)
        return {
            **head(self.service, self.job.options, "text_completion", "cmpl"),
            "choices": [self._choice(place, output) for place, output in enumerate(outputs)],
            "usage": usage_of(outputs, counts_output=self._shows_output),
            "speculation": speculation_of(outputs, shows_origins=self.fields.shows_origins, texts=self.texts),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; the usage is the last one, if it is asked for."""
        top = head(self.service, self.job.options, "text_completion", "cmpl")
        wants_usage = self.fields.stream_options is not None and bool(self.fields.stream_options.include_usage)
        if wants_usage:
            top["usage"] = None
        num_chars: dict[int, int] = {}  # of the tokens so far, by choice
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self.service.generation.stream(self.job)) as stream:
            async for index, chunk in stream:
                place = index * self.job.params.n + chunk.sample_index
                text = self._prefix(index) if place not in num_chars else ""
                num_chars.setdefault(place, 0)
                choice = self._piece(place, text, chunk, num_chars)
                if chunk.output is not None:
                    outputs[place] = chunk.output
                yield data_event({**top, "choices": [choice], **(chunk_origins(chunk, self.texts) if self.fields.shows_origins else {})})
        if wants_usage:
            ended = [outputs[place] for place in sorted(outputs)]
            usage = usage_of(ended, counts_output=self._shows_output)
            yield data_event({**top, "choices": [], "usage": usage, "speculation": speculation_of(ended, shows_origins=False)})
        yield DONE

    @property
    def _shows_output(self) -> bool:
        return self.fields.max_tokens != 0

    def _prefix(self, index: int) -> str:
        """What stands in front of an output: the prompt, where it is echoed."""
        if not self.fields.echo:
            return ""
        prompt = self.fields.prompts[index]
        return prompt if isinstance(prompt, str) else self.texts.decode(prompt)

    def _choice(self, place: int, output: RequestOutput) -> dict[str, Any]:
        shown = output.text if self._shows_output else ""
        logprobs = None
        if self.fields.logprobs is not None:
            known, ids = (output.prompt_logprobs or [], output.prompt_token_ids) if self.fields.echo else ([], [])
            new, new_ids = (output.logprobs or [], output.token_ids) if self._shows_output else ([], [])
            logprobs = self.texts.completion_lists([*known, *new], [*ids, *new_ids], 0)
        text = self._prefix(place // self.job.params.n) + shown
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": self._reason(output)}

    def _piece(self, place: int, prefix: str, chunk: StreamChunk, num_chars: dict[int, int]) -> dict[str, Any]:
        logprobs = None
        if self.fields.logprobs is not None:
            ids = chunk.token_ids if self._shows_output else []
            known = [*chunk.prompt_logprobs, *chunk.logprobs[: len(ids)]]
            logprobs = self.texts.completion_lists(known, [*chunk.prompt_token_ids, *ids], num_chars[place])
            num_chars[place] += sum(map(len, logprobs["tokens"]))
        text = prefix + (chunk.text if self._shows_output else "")
        reason = None if chunk.output is None else self._reason(chunk.output)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _reason(self, output: RequestOutput) -> str:
        return output.finish_reason if self._shows_output else "length"

"""OpenAI's completions: `/v1/completions`, with the fields that vLLM and llama.cpp add."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from paceline.outputs import RequestOutput, StreamChunk
from paceline.server.answering import chunk_origins, speculation_of
from paceline.server.errors import check_length, invalid
from paceline.server.fields import FastList, WholeNumber
from paceline.server.framing import as_json, data_event, large_json
from paceline.server.generation import GenerationRequest
from paceline.server.openai_chat import DONE, TextFields, answer_head, usage_of
from paceline.server.parameters import check_prediction, request_options, token_limit
from paceline.server.service import Service

DOCUMENTED = {"temperature": 1.0}
"""OpenAI's default."""
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionFields(TextFields, at=("completions", "")):
    prompt: str | FastList[str] | FastList[int] | FastList[FastList[int]]
    echo: bool | None = None
    logprobs: WholeNumber | None = None
    prediction: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        is_one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        return [given] if is_one else given

    def parameter_names(self) -> Mapping[str, str]:
        return {
            "grammar": self.form_name(),
            "prompt_logprobs": "logprobs" if self.prompt_logprobs is None else "prompt_logprobs",
            "prompt_token_ids": "prompt",
            "adapter": "model",
            "include_stop": "include_stop_str_in_output",
        }


def completions(service: Service, fields: CompletionFields) -> "_Completion":
    """Continue a text, or several."""
    adapter = service.adapter_of(fields.model)
    prompts, settings = fields.prompts, service.settings
    if not 1 <= len(prompts) <= settings.max_prompts:
        raise invalid("prompt", f"holds {len(prompts)} prompts: send 1 to {settings.max_prompts}")
    check_length("prompt", sum(map(len, prompts)), settings)
    fields.check_prompt_logprobs()
    given = fields.n_predict if fields.max_tokens is None else fields.max_tokens
    limit = token_limit("max_tokens", DEFAULT_MAX_TOKENS if given is None else given, low=0)
    check_prediction(fields.prediction, is_read=service.reads_predictions)
    params = fields.params(
        settings,
        service.sampling_defaults.completion_defaults(DOCUMENTED),
        1 if limit == 0 else limit,  # a pass over the prompt always ends with a token, which is then not shown
        logprobs=fields.logprobs,
        prompt_logprobs=fields.logprobs if fields.echo and fields.prompt_logprobs is None else fields.prompt_logprobs,
    )
    request = GenerationRequest(
        prompt_ids=lambda input_processor: [input_processor.prompt_ids(prompt) for prompt in prompts],
        num_prompts=len(prompts),
        params=params,
        options=request_options(fields, fields.prediction, adapter=adapter),
        fills_context=limit is None,
    )
    return _Completion(service, fields, request, shows_output=limit != 0)


@dataclass(frozen=True, slots=True)
class _Completion:
    service: Service
    fields: CompletionFields
    request: GenerationRequest
    shows_output: bool

    async def collect(self) -> list[RequestOutput]:
        return await self.service.generation.collect(self.request)

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        return {
            **answer_head(self.service, self.request.options, "text_completion", "cmpl"),
            "choices": [self._choice(place, output) for place, output in enumerate(outputs)],
            "usage": usage_of(outputs, counts_output=self.shows_output),
            "speculation": speculation_of(outputs, shows_origins=self.fields.shows_origins, texts=self.service.texts),
        }

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events; the usage is the last one, if it is requested."""
        top = answer_head(self.service, self.request.options, "text_completion", "cmpl")
        if self.fields.includes_usage:
            top["usage"] = None
        num_chars: dict[int, int] = {}  # characters sent so far, by index of the choice
        outputs: dict[int, RequestOutput] = {}
        async with aclosing(self.service.generation.stream(self.request)) as stream:
            async for index, chunk in stream:
                place = index * self.request.params.n + chunk.sample_index
                text = self._prefix(index) if place not in num_chars else ""
                num_chars.setdefault(place, 0)
                if chunk.output is not None:
                    outputs[place] = chunk.output
                if chunk.prompt_logprobs:  # one event for all tokens of the prompt
                    yield await asyncio.to_thread(self._event, top, place, text, chunk, num_chars, large_json)
                else:
                    yield self._event(top, place, text, chunk, num_chars, as_json)
        if self.fields.includes_usage:
            ended = [outputs[place] for place in sorted(outputs)]
            usage = usage_of(ended, counts_output=self.shows_output)
            yield data_event({**top, "choices": [], "usage": usage, "speculation": speculation_of(ended, shows_origins=False)})
        yield DONE

    def _event(
        self,
        top: Mapping[str, Any],
        place: int,
        prefix: str,
        chunk: StreamChunk,
        num_chars: dict[int, int],
        encode: Callable[[Mapping[str, Any]], bytes],
    ) -> bytes:
        logprobs = None
        if self.fields.logprobs is not None:
            ids = chunk.token_ids if self.shows_output else []
            known = [*chunk.prompt_logprobs, *chunk.logprobs[: len(ids)]]
            logprobs = self.service.texts.completion_lists(known, [*chunk.prompt_token_ids, *ids], num_chars[place])
            num_chars[place] += sum(map(len, logprobs["tokens"]))
        text = prefix + (chunk.text if self.shows_output else "")
        reason = None if chunk.output is None else self._reason(chunk.output)
        choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": reason}
        origins = chunk_origins(chunk, self.service.texts) if self.fields.shows_origins else {}
        return data_event({**top, "choices": [choice], **origins}, encode)

    def _prefix(self, index: int) -> str:
        """The text before an output: the prompt, where it is echoed."""
        if not self.fields.echo:
            return ""
        prompt = self.fields.prompts[index]
        return prompt if isinstance(prompt, str) else self.service.texts.decode(prompt)

    def _choice(self, place: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = None
        if self.fields.logprobs is not None:
            known, ids = (output.prompt_logprobs or [], output.prompt_token_ids) if self.fields.echo else ([], [])
            new, new_ids = (output.logprobs or [], output.token_ids) if self.shows_output else ([], [])
            logprobs = self.service.texts.completion_lists([*known, *new], [*ids, *new_ids], 0)
        text = self._prefix(place // self.request.params.n) + (output.text if self.shows_output else "")
        choice = {"index": place, "text": text, "logprobs": logprobs, "finish_reason": self._reason(output)}
        if self.fields.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self.service.texts.prompt_entries(output.prompt_logprobs or [])
        return choice

    def _reason(self, output: RequestOutput) -> str:
        return output.finish_reason if self.shows_output else "length"

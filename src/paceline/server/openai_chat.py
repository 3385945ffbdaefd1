"""OpenAI's chats: `/v1/chat/completions`, with the fields that vLLM and llama.cpp add."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pydantic import model_validator

from paceline.engine.inputs import RequestOptions
from paceline.outputs import RequestOutput
from paceline.parsing.events import Answer, Event, Finished, Reasoning, Step, Text, ToolCallArguments, ToolCallStart
from paceline.parsing.tools import Tool, ToolUse
from paceline.sampling.params import SamplingParams
from paceline.server.answer_form import FormFields
from paceline.server.answering import chunk_origins, speculation_of
from paceline.server.chat import ChatRequest, checked_tools, plain_content
from paceline.server.errors import check_length, invalid, num_chars, shown
from paceline.server.fields import FastList, Fields, WholeNumber
from paceline.server.framing import data_event
from paceline.server.parameters import check_prediction, num_top_logprobs, request_options, sampling_params, token_limit
from paceline.server.service import Service
from paceline.server.settings import ServerSettings

DONE = b"data: [DONE]\n\n"


class ContentPart(Fields, at=("chat", "messages[].content[]")):
    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "reasoning"]
    text: str | None = None
    refusal: str | None = None
    thinking: "str | FastList[ContentPart] | None" = None
    reasoning: str | None = None

    @property
    def is_reasoning(self) -> bool:
        """Whether it is reasoning, as Mistral and vLLM write it."""
        return self.type in ("thinking", "reasoning")

    @property
    def reasoning_text(self) -> str:
        if isinstance(self.thinking, list):
            return "".join(part.text or "" for part in self.thinking)
        return self.thinking or self.reasoning or self.text or ""


class CalledFunction(Fields, at=("chat", "messages[].tool_calls[].function")):
    """A function that was called; its arguments are an object or the text of one."""

    name: str
    arguments: str | dict[str, Any] | None = None


class CallFields(Fields, at=("chat", "messages[].tool_calls[]")):
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class Message(Fields, at=("chat", "messages[]")):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | FastList[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: FastList[CallFields] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | dict[str, Any] | list[Any] | None = None  # only a text is read
    prefix: bool | None = None
    partial: bool | None = None

    @property
    def texts(self) -> list[str]:
        """Its content, without empty texts."""
        if isinstance(self.content, str):
            given: list[str | None] = [self.content]
        else:
            given = [part.text or part.refusal for part in self.content or [] if not part.is_reasoning]
        return [text for text in given if text] or ([self.refusal] if self.refusal else [])

    @property
    def reasoning_texts(self) -> str:
        parts = [] if isinstance(self.content, str) else self.content or []
        return "".join(part.reasoning_text for part in parts if part.is_reasoning)


class FunctionFields(Fields, at=("chat", "tools[].function")):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Fields, at=("chat", "tools[]")):
    """A tool. All tools are functions."""

    type: Literal["function"] = "function"
    function: FunctionFields


class Prediction(Fields, at=("chat", "prediction")):
    type: Literal["content"]
    content: str | list[ContentPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text or "" for part in self.content)


class StreamOptions(Fields, at=("chat", "stream_options")):
    include_usage: bool | None = None


class ReasoningFields(Fields, at=("chat", "reasoning")):
    effort: str | None = None
    enabled: bool | None = None


class ThinkingFields(Fields, at=("chat", "thinking")):
    """Whether to think, as GLM, Kimi and DeepSeek write it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class TextFields(FormFields):
    """Fields that chats and completions share."""

    model: str | None = None
    n: WholeNumber | None = None
    max_tokens: WholeNumber | None = None
    n_predict: WholeNumber | None = None
    stop: str | FastList[str] | None = None
    include_stop_str_in_output: bool | None = None
    repeat_penalty: float | None = None
    prompt_logprobs: WholeNumber | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _take_other_names(self) -> "TextFields":
        self.repetition_penalty = self.repeat_penalty if self.repetition_penalty is None else self.repetition_penalty
        return self

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def params(self, settings: ServerSettings, defaults: Mapping[str, Any], max_tokens: int | None, **more: Any) -> SamplingParams:
        """Return how tokens are chosen, with the errors of `sampling_params` and `form`."""
        own: dict[str, Any] = {
            "n": self.n,
            "stop": self.stop,
            "include_stop": bool(self.include_stop_str_in_output),
            "grammar": self.form(settings),
        }
        return sampling_params(self, settings, defaults, max_tokens=max_tokens, **own, **more)

    def check_prompt_logprobs(self) -> None:
        """Raise HttpError if log-probabilities of the prompt are requested of a stream."""
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", f"is {self.prompt_logprobs}, and a stream has none: send stream=false")


class ChatFields(TextFields, at=("chat", "")):
    messages: FastList[Message]
    max_completion_tokens: WholeNumber | None = None
    logprobs: bool | None = None
    top_logprobs: WholeNumber | None = None
    prediction: Prediction | None = None
    tools: FastList[ToolFields] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    reasoning: ReasoningFields | None = None
    thinking: ThinkingFields | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def parameter_names(self) -> Mapping[str, str]:
        has_effort = self.reasoning_effort is not None or self.reasoning is None
        has_switch = self.enable_thinking is not None or self.reasoning is None
        return {
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "template_options": "chat_template_kwargs",
            "adapter": "model",
            "max_tokens": "max_completion_tokens" if self.max_completion_tokens is not None else "max_tokens",
            "include_stop": "include_stop_str_in_output",
            "grammar": self.form_name(),
            "reasoning_effort": "reasoning_effort" if has_effort else "reasoning.effort",
            "thinking": "thinking" if self.thinking is not None else "enable_thinking" if has_switch else "reasoning.enabled",
        }


def chat_completions(service: Service, fields: ChatFields) -> "_Chat":
    """Answer a conversation."""
    adapter = service.adapter_of(fields.model)
    fields.check_prompt_logprobs()
    messages = conversation(fields.messages, service.settings)
    prediction = None if fields.prediction is None else fields.prediction.text
    check_prediction(prediction, is_read=service.reads_predictions)
    limit = token_limit(fields.parameter_names()["max_tokens"], fields.max_completion_tokens, fields.max_tokens, fields.n_predict)
    tools = tools_of(fields.tools, service.settings)
    request = ChatRequest(
        messages=messages,
        **tool_choice(fields.tool_choice, tools),
        **_ending(fields),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        template_options=_template_options(fields, service),
        params=fields.params(
            service.settings,
            service.sampling_defaults.chat,
            limit,
            logprobs=num_top_logprobs(logprobs=fields.logprobs, top_logprobs=fields.top_logprobs),
            prompt_logprobs=fields.prompt_logprobs,
        ),
        options=request_options(fields, prediction, adapter=adapter),
        fills_context=limit is None,
    )
    return _Chat(service, fields, request)


def conversation(messages: Sequence[Message], settings: ServerSettings) -> list[dict[str, Any]]:
    """Return the messages as chat templates take them; HttpError if they are too long, or one is not served."""
    turns, names = list[dict[str, Any]](), dict[str, str]()
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        _check_message(place, message)
        turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
        turn["content"] = plain_content([{"type": "text", "text": text} for text in message.texts])
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, f"call_{index}_{at}") for at, call in enumerate(message.tool_calls)]
            names |= {call["id"]: call["function"]["name"] for call in turn["tool_calls"]}
        reasoning = message.reasoning_content or message.reasoning or message.reasoning_texts
        if reasoning and isinstance(reasoning, str):
            turn["reasoning_content"] = reasoning
        if message.role == "tool":
            turn["tool_call_id"] = message.tool_call_id or next(reversed(names), "")
        if name := message.name or names.get(turn.get("tool_call_id", "")):
            turn["name"] = name
        turns.append(turn)
    check_length("messages", num_chars(turns), settings)
    return turns


def _check_message(place: str, message: Message) -> None:
    if message.role == "function":
        raise invalid(f"{place}.role", "is function, the old form of tools: send the role tool", "unsupported_parameter")
    for name, role in {"tool_calls": "assistant", "tool_call_id": "tool", "reasoning_content": "assistant"}.items():
        if getattr(message, name) and message.role != role:
            raise invalid(f"{place}.{name}", f"belongs to the role {role}, and the message is of {message.role}: leave it out")
    if message.reasoning_texts and message.role != "assistant":
        raise invalid(f"{place}.content", f"has reasoning, which belongs to the role assistant, and the message is of {message.role}")
    if message.content is None and message.role not in ("assistant", "tool"):
        raise invalid(f"{place}.content", "is missing: send a text", "missing_required_parameter")


def _call(call: CallFields, new_id: str) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": call.function.arguments or "{}"}
    return {"id": call.id or new_id, "type": "function", "function": function}


tools_of = partial(checked_tools, within="function")
"""The tools of a request; arguments and errors as for `checked_tools`."""


def tool_choice(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool], within: str = "function") -> dict[str, Any]:
    """Fields of a `ChatRequest`: the tools, whether they are called, and the only one that is.

    Args:
        within: the field of a tool that has its name; empty = the tool itself has it.

    Raises:
        HttpError: it is none.
    """
    if choice is None or choice in [use.value for use in ToolUse]:
        return {"tools": tools, "tool_use": ToolUse(choice or "auto")}
    given = choice if isinstance(choice, Mapping) else {}
    if given.get("type") == "allowed_tools":
        return _allowed_choice(given.get("allowed_tools") if within else given, tools, within)
    one = given.get("function", given)
    name = one.get("name") if isinstance(one, Mapping) and given.get("type") == "function" else None
    if not isinstance(name, str):
        function = '"function": {"name": ...}' if within else '"name": ...'
        text = f'send none, auto, required, {{"type": "function", {function}}} or {{"type": "allowed_tools", ...}}'
        what = f"has the type {shown(given.get('type'))}" if given else f"is {shown(choice)}"
        raise invalid("tool_choice", f"{what}: {text}")
    return {"tools": tools, "tool_use": ToolUse.REQUIRED, "tool_name": name}


def _allowed_choice(allowed: object, tools: Sequence[Tool], within: str) -> dict[str, Any]:
    """Convert a tool choice of type "allowed_tools", which has `mode` and `tools`."""
    given = allowed if isinstance(allowed, Mapping) else {}
    listed = given.get("tools")
    ones = [one.get(within) if within else one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    names = [one["name"] for one in ones if isinstance(one, Mapping) and isinstance(one.get("name"), str)]
    if given.get("mode") not in ("auto", "required") or not names or not isinstance(listed, list) or len(names) != len(listed):
        mode = shown(given.get("mode"))
        what = "has no tools" if listed in (None, []) else f"has the mode {mode}, or a tool that is no function with a name"
        raise invalid("tool_choice.allowed_tools", f"{what}: send the mode auto or required, and one or more functions with names")
    for name in names:
        if name not in [tool.name for tool in tools]:
            raise invalid("tool_choice.allowed_tools", f"allows the function {name!r}, which is not among the tools: name one of them")
    return {"tools": tuple(tool for tool in tools if tool.name in names), "tool_use": ToolUse(given["mode"])}


def _ending(fields: ChatFields) -> dict[str, Any]:
    """Fields of a `ChatRequest`: whether the last message is continued, and whether the model's turn begins."""
    last = fields.messages[-1] if fields.messages else None
    continues = bool(fields.continue_final_message) or (last is not None and bool(last.prefix or last.partial))
    if continues and fields.add_generation_prompt:
        raise invalid("add_generation_prompt", "and continue_final_message exclude each other: send one of them")
    return {"continue_final_message": continues, "add_generation_prompt": not continues and fields.add_generation_prompt is not False}


def _template_options(fields: ChatFields, service: Service) -> dict[str, Any]:
    """Variables of the chat template: `chat_template_kwargs`, and those for how much to think."""
    effort: str | None = fields.reasoning_effort
    thinks = fields.enable_thinking
    if fields.reasoning is not None:
        effort, thinks = effort or fields.reasoning.effort, fields.reasoning.enabled if thinks is None else thinks
    if fields.thinking is not None and fields.thinking.type in ("enabled", "disabled"):
        thinks = fields.thinking.type == "enabled"
    found = service.chat.thinking_options(fields, effort=effort, thinks=thinks)
    meant = {} if effort is None else {"enable_thinking": effort != "none", "reasoning_effort": effort}
    for name, value in (fields.chat_template_kwargs or {}).items():
        if meant.get(name, value) != value:
            text = f"is {shown(value)}, which contradicts reasoning_effort {shown(effort)}: send one of them"
            raise invalid(f"chat_template_kwargs.{name}", text)
    return {**found, **service.chat.template_options(fields, fields.chat_template_kwargs)}


@dataclass(frozen=True, slots=True)
class _Chat:
    service: Service
    fields: ChatFields
    request: ChatRequest

    async def collect(self) -> list[Answer]:
        return await self.service.chat.collect(self.request)

    def whole(self, answers: list[Answer]) -> dict[str, Any]:
        outputs = [answer.output for answer in answers]
        found = {
            **answer_head(self.service, self.request.options, "chat.completion", "chatcmpl"),
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_of(outputs),
            "speculation": speculation_of(outputs, shows_origins=self.fields.shows_origins, texts=self.service.texts),
        }
        if self.fields.prompt_logprobs is not None:
            found["prompt_logprobs"] = self.service.texts.prompt_entries(outputs[0].prompt_logprobs or [])
        return found

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as events: for each sample its role, its pieces and its end; then the usage, if it is requested."""
        top = answer_head(self.service, self.request.options, "chat.completion.chunk", "chatcmpl")
        if self.fields.includes_usage:
            top["usage"] = None
        begun: set[int] = set()
        outputs: list[RequestOutput] = []
        async with aclosing(self.service.chat.stream(self.request)) as stream:
            async for step in stream:
                sample = step.chunk.sample_index
                if sample not in begun:
                    begun.add(sample)
                    yield data_event({**top, "choices": [_delta(sample, {"role": "assistant", "content": ""})]})
                for fields in self._pieces(step):
                    yield data_event({**top, **fields})
                if step.chunk.output is not None:
                    outputs.append(step.chunk.output)
        if self.fields.includes_usage:
            outputs.sort(key=lambda output: output.sample_index)
            end = {"usage": usage_of(outputs), "speculation": speculation_of(outputs, shows_origins=False)}
            yield data_event({**top, "choices": [], **end})
        yield DONE

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.output.sample_index,
            "message": _message(answer),
            "logprobs": self.service.texts.chat_content(answer.output.logprobs or []) if self.fields.logprobs else None,
            "finish_reason": answer.finish_reason,
        }

    def _pieces(self, step: Step) -> Iterator[dict[str, Any]]:
        """The events of a step. The first one has the log-probabilities and origins of its tokens, if they are requested."""
        sample = step.chunk.sample_index
        pieces = [_piece(sample, one) for one in step.events]
        shows_origins = self.fields.shows_origins
        if step.chunk.token_ids and (self.fields.logprobs or shows_origins):
            if not pieces or pieces[0]["finish_reason"] is not None:
                pieces.insert(0, _delta(sample, {"content": ""}))
            if self.fields.logprobs:
                pieces[0]["logprobs"] = self.service.texts.chat_content(step.chunk.logprobs)
        for index, piece in enumerate(pieces):
            yield {"choices": [piece], **(chunk_origins(step.chunk, self.service.texts) if index == 0 and shows_origins else {})}


def answer_head(service: Service, options: RequestOptions, kind: str, prefix: str) -> dict[str, Any]:
    """The fields that an answer, or every chunk of one, begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name_of(options),
        "system_fingerprint": service.fingerprint,
    }


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


def _message(answer: Answer) -> dict[str, Any]:
    """The whole message. It has reasoning and calls only if the model wrote some."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.tool_calls
    ]
    message = {"role": "assistant", "content": answer.text if answer.text or not calls else None, "refusal": None}
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    return {**message, "tool_calls": calls} if calls else message


def _reasoning(text: str) -> dict[str, str]:
    """Reasoning by both names: vLLM's newer one, and the older one, which more clients read."""
    return {"reasoning_content": text, "reasoning": text}


def _piece(sample: int, event: Event) -> dict[str, Any]:
    if isinstance(event, Finished):
        return _delta(sample, {}, event.finish_reason)
    if isinstance(event, Text):
        return _delta(sample, {"content": event.text})
    if isinstance(event, Reasoning):
        return _delta(sample, _reasoning(event.text))
    return _delta(sample, {"tool_calls": [_call_delta(event)]})


def _call_delta(event: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
    if isinstance(event, ToolCallArguments):
        return {"index": event.call, "function": {"arguments": event.json}}
    return {"index": event.call, "id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}


def _delta(sample: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": sample, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

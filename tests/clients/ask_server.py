"""Sends a request to a server through the official client of one API and prints the parsed response as JSON.

Runs in an environment with that client:

python ask_server.py API URL '{"messages": ..., "seed": ..., "temperature": ..., "max_tokens": ...}'
"""

import json
import sys
from typing import Any

_, API, URL, ASKED = sys.argv
ASKED_FOR = json.loads(ASKED)
MESSAGES, SEED, TEMPERATURE, MAX_TOKENS = (ASKED_FOR[name] for name in ("messages", "seed", "temperature", "max_tokens"))
QUESTION = [{"role": "user", "content": "How is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Bergen"]}}, "required": ["city"]}
SCHEMA["additionalProperties"] = False
WEATHER = {"name": "weather", "description": "Tomorrow's weather.", "parameters": SCHEMA}
JSON_SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


def ask_responses(url: str) -> dict[str, Any]:
    """OpenAI's responses."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create = client.responses.create
    common: Any = {"model": "mini", "input": MESSAGES, "temperature": TEMPERATURE, "max_output_tokens": MAX_TOKENS}
    common["extra_body"] = {"seed": SEED}
    whole = create(**common)
    with client.responses.stream(**common) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    tools: Any = {"tools": [{"type": "function", **WEATHER, "strict": True}]}
    required: Any = {**tools, "tool_choice": "required", "parallel_tool_calls": False}
    called = create(model="mini", input=QUESTION, temperature=0, **required)
    (call,) = [item for item in called.output if item.type == "function_call"]
    with client.responses.stream(model="mini", input=QUESTION, temperature=0, **required) as stream:
        call_kinds = [event.type for event in stream]
        call_streamed = [item.arguments for item in stream.get_final_response().output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    told = create(model="mini", input=[*QUESTION, *called.output, result], temperature=0, max_output_tokens=8, **tools)
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": JSON_SCHEMA, "strict": True}}
    return {
        "whole": whole.output_text,
        "streamed": streamed.output_text,
        "events": kinds,
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        "streamed_usage": [streamed.usage.input_tokens, streamed.usage.output_tokens],
        "call": [call.name, json.loads(call.arguments), called.status],
        "call_streamed": call_streamed == [call.arguments],
        "call_events": call_kinds,
        "told": told.status,
        "json": json.loads(create(model="mini", input="Who?", text=form, max_output_tokens=60).output_text),
        "drafter": whole.speculation["drafter"],
        "instructed": create(model="mini", input="Hello", instructions="Be short.", max_output_tokens=4).usage.input_tokens,
        "error": error_of(openai.BadRequestError, lambda: create(**{**common, "extra_body": {"temperatur": 1}})),
        "stored": error_of(openai.BadRequestError, lambda: create(model="mini", input="a", previous_response_id="resp_1")),
        "not_found": error_of(openai.NotFoundError, lambda: create(**{**common, "model": "other"})),
    }


def ask_messages(url: str) -> dict[str, Any]:
    """Anthropic's messages."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    create = client.messages.create
    common: Any = {"model": "mini", "messages": MESSAGES, "max_tokens": MAX_TOKENS}
    common["extra_body"] = {"seed": SEED, "temperature": TEMPERATURE}  # new versions of the client have no argument for either
    greedy: Any = {"model": "mini", "extra_body": {"temperature": 0}}
    whole = create(**common)
    with client.messages.stream(**common) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    raw_kinds = [event.type for event in create(**common, stream=True)]
    tools: Any = {"tools": [{"name": "weather", "description": "Tomorrow's weather.", "input_schema": SCHEMA}]}
    required: Any = {**tools, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    called = create(messages=QUESTION, max_tokens=80, **greedy, **required)
    (call,) = [block for block in called.content if block.type == "tool_use"]
    with client.messages.stream(messages=QUESTION, max_tokens=80, **greedy, **required) as stream:
        call_streamed = [block.input for block in stream.get_final_message().content if block.type == "tool_use"]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    turns = [*QUESTION, {"role": "assistant", "content": called.content}, result]
    told = create(messages=turns, max_tokens=8, **greedy, **tools)
    stopped = create(**{**common, "stop_sequences": [whole.content[0].text[3:6]]})
    form: Any = {"format": {"type": "json_schema", "schema": JSON_SCHEMA}}
    return {
        "whole": whole.content[0].text,
        "streamed": streamed.content[0].text,
        "events": kinds,
        "raw_events": raw_kinds,
        "usage": [whole.usage.input_tokens + whole.usage.cache_read_input_tokens, whole.usage.output_tokens],
        "streamed_usage": [streamed.usage.input_tokens + streamed.usage.cache_read_input_tokens, streamed.usage.output_tokens],
        "counted": client.messages.count_tokens(model="mini", messages=MESSAGES).input_tokens,
        "call": [call.name, call.input, called.stop_reason],
        "call_streamed": call_streamed == [call.input],
        "told": told.stop_reason,
        "stopped": [stopped.stop_reason, stopped.stop_sequence == whole.content[0].text[3:6]],
        "json": json.loads(create(model="mini", messages=QUESTION, output_config=form, max_tokens=60).content[0].text),
        "drafter": whole.speculation["drafter"],
        "models": [model.id for model in client.models.list()],
        "error": error_of(anthropic.BadRequestError, lambda: create(**{**common, "extra_body": {"temperatur": 1}})),
        "streamed_error": error_of(anthropic.BadRequestError, lambda: create(**common, stream=True, system=[{"type": "image"}])),
        "not_found": error_of(anthropic.NotFoundError, lambda: create(**{**common, "model": "other"})),
    }


def ask_ollama(url: str) -> dict[str, Any]:
    """Ollama's own API."""
    import ollama

    client = ollama.Client(host=url)
    options: Any = {"temperature": TEMPERATURE, "seed": SEED, "num_predict": MAX_TOKENS, "top_k": 0, "top_p": 1.0}
    common: Any = {"model": "mini", "messages": MESSAGES, "options": options}
    whole = client.chat(**common)
    parts = list(client.chat(**common, stream=True))

    def weather(city: str) -> str:
        """Tomorrow's weather.

        Args:
            city: where
        """
        return f"rain in {city}"

    called = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]}
    turns = [*QUESTION, called, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    told = client.chat(model="mini", messages=turns, tools=[weather], options={"num_predict": 8})
    raw = client.generate(model="mini", prompt="I need a", raw=True, options={**options, "num_predict": 6})
    raw_parts = list(client.generate(model="mini", prompt="I need a", raw=True, options={**options, "num_predict": 6}, stream=True))
    prompted = client.generate(model="mini", prompt=MESSAGES[0]["content"], options=options)
    answered = client.chat(model="mini", messages=QUESTION, format=JSON_SCHEMA, options={"num_predict": 60})
    listed, running, shown = client.list(), client.ps(), client.show("mini")
    return {
        "whole": whole.message.content,
        "streamed": "".join(part.message.content for part in parts),
        "done": [part.done for part in parts],
        "usage": [whole.prompt_eval_count, whole.eval_count],
        "streamed_usage": [parts[-1].prompt_eval_count, parts[-1].eval_count],
        "told": told.done_reason,
        "raw": [raw.response == "".join(part.response for part in raw_parts), raw.eval_count],
        "prompted": prompted.response,
        "json": json.loads(answered.message.content),
        "logprobs": len(client.chat(**common, logprobs=True, top_logprobs=2).logprobs),
        "loaded": client.generate(model="mini").done_reason,
        "models": [[model.model for model in listed.models], [model.model for model in running.models]],
        "context": shown.modelinfo["llama.context_length"],
        "capabilities": shown.capabilities,
        "error": error_of(ollama.ResponseError, lambda: client.chat(**{**common, "options": {"temperatur": 1}})),
        "streamed_error": error_of(ollama.ResponseError, lambda: list(client.chat(**{**common, "options": {"mirostat": 1}}, stream=True))),
        "not_found": error_of(ollama.ResponseError, lambda: client.chat(**{**common, "model": "other"})),
    }


def error_of(kind: type[Exception], ask: Any) -> list[Any]:
    """The status and the text of the error that a call raises."""
    try:
        ask()
    except kind as error:
        return [getattr(error, "status_code", None), str(error)]
    raise AssertionError(f"no {kind.__name__}")


ASKING = {"responses": ask_responses, "messages": ask_messages, "ollama": ask_ollama}
sys.stdout.write(json.dumps(ASKING[API](URL)))

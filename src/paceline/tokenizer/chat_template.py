"""Chat templates: untrusted Jinja programs that render a conversation as the text a model was trained on, in a process with limits."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from paceline.errors import BackendUnavailableError, CheckpointError, RequestError
from paceline.isolated import Failure, IsolatedError, IsolatedFunction, Limits

MEMORY_BYTES = 512 << 20
"""Address space of the rendering process."""
CPU_SECONDS = 3
"""Limit of CPU time for one conversation."""
WAIT_SECONDS = 10
"""Limit of wall time for one conversation, on a machine that may be busy."""

_RENDERER = "paceline.tokenizer.template_process:renderer"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_DEFAULT_MAX_TOKENS = 1 << 17
_CHARACTERS_PER_TOKEN = 32  # usual tokens have four or five characters, but one can be a long run of spaces
_MIN_CHARACTERS = 1 << 16


class ChatTemplate:
    """Renders one template, in a process that starts with the first conversation and ends with this object.

    Args:
        source: the Jinja template.
        special_tokens: their texts by the name of the template's variable, such as `bos_token`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.isolated = IsolatedFunction(_RENDERER, Limits(WAIT_SECONDS, MEMORY_BYTES, CPU_SECONDS), setup=json.dumps(source))

    def check(self) -> None:
        """Check that the template compiles.

        Raises:
            CheckpointError: it does not compile, or exceeds the limits.
            BackendUnavailableError: no process can be started.
        """
        try:
            self.isolated.start()
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise _not_started(error) from error
            raise CheckpointError(f"the model's chat template cannot be compiled: {_reason(error)}; send plain prompts") from error

    def mentions(self, name: str) -> bool:
        """Return whether the template's text contains the name of a variable. For `tools`, the older name `functions` counts too."""
        if name == "tools" and re.search(r"\{\{-?\s*functions\b", self._source):
            return True
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool,
        max_model_len: int | None = None,
    ) -> str:
        """Render a conversation.

        Args:
            tools: functions that may be called, in OpenAI's format.
            options: further variables of the template.
            max_model_len: largest number of tokens of a prompt; limits the length of the text (`max_rendered_chars`).

        Raises:
            RequestError: the messages are invalid, or the template rejects them, fails or exceeds a limit.
            BackendUnavailableError: no process can be started.
        """
        message_texts = [
            _dump_json("messages", partial(_plain_message, message)) for message in messages
        ]  # one JSON call for all messages would hold the GIL
        text = f"[{', '.join(message_texts)}]"
        tools_text, options_text = _dump_json("tools", lambda: list(tools) or None), _dump_json("options", lambda: options or {})
        num_input_chars = len(text) + (len(tools_text) if tools else 0) + (len(options_text) if options else 0)
        limit = max_rendered_chars(num_input_chars, max_model_len)
        settings = json.dumps({"add_generation_prompt": add_generation_prompt, "special_tokens": self._special_tokens, "max_chars": limit})
        conversation = f'{{"messages": {text}, "options": {options_text}, {settings[1:-1]}, "tools": '
        try:
            self.check()
            try:
                rendered: str = self.isolated.run(f"{conversation}{tools_text}}}")
            except IsolatedError as error:
                if tools or error.error_type != "TypeError":
                    raise
                rendered = self.isolated.run(f"{conversation}[]}}")  # some templates loop over `tools` without a check for None
        except CheckpointError as error:
            raise RequestError(str(error), parameter="messages") from error
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise _not_started(error) from error
            raise RequestError(f"the model's chat template rejects these messages: {_reason(error)}", parameter="messages") from error
        return rendered


def _reason(error: IsolatedError) -> str:
    if error.failure is not Failure.RAISED or error.error_type == "TemplateError":
        return str(error)
    return f"{str(error) or 'it failed'} ({error.error_type})"


def max_rendered_chars(num_input_chars: int, max_model_len: int | None) -> int:
    """Return the largest length of a rendered text: twice the input, 32 characters for each token of the context, and a constant.

    Args:
        num_input_chars: length of the template's input as JSON.
        max_model_len: None = 131,072 tokens.
    """
    return 2 * num_input_chars + _CHARACTERS_PER_TOKEN * (max_model_len or _DEFAULT_MAX_TOKENS) + _MIN_CHARACTERS


def _plain_message(message: object) -> dict[str, Any]:
    """Convert a message for templates: without keys whose value is None, and with the reasoning text under all its usual names.

    Source: transformers, `apply_chat_template`. Deviation: a tuple becomes a list.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"{message!r} is not a message")
    given = {str(key): value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING_KEYS if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _dump_json(name: str, make: Callable[[], object]) -> str:
    """Return the result of `make` as JSON.

    Raises:
        RequestError: it cannot be written as JSON.
    """
    try:
        return json.dumps(make(), default=_to_json_type)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be JSON values ({error}): send strings, numbers, lists and objects", parameter=name) from error


def _to_json_type(value: object) -> object:
    """Convert a value that JSON lacks: mappings to dicts, NumPy numbers to Python's, anything else to the name of its type."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if isinstance(value, np.generic) else f"<{type(value).__name__}>"


def _not_started(error: IsolatedError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"chat templates are rendered in a separate process, but {sys.executable!r} cannot be started ({error}): send plain prompts, or "
        "run paceline in a Python that can start processes"
    )

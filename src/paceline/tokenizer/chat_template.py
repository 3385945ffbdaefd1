"""Renders conversations with chat templates. These are untrusted Jinja programs, so they run in a process with limits."""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from paceline.errors import BackendUnavailableError, CheckpointError, RequestError
from paceline.isolated import Failure, IsolatedError, IsolatedFunction, Limits

MAX_MEMORY_BYTES = 512 << 20
"""Maximum address space of the rendering process."""
MAX_CPU_S = 3
"""Maximum CPU time for one conversation."""
MAX_RENDER_S = 10
"""Maximum wall-clock time for one conversation; longer than `MAX_CPU_S`, because the machine may be busy."""

_RENDERER_FUNCTION = "paceline.tokenizer.template_process:renderer"
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
_MISSING_FIELD_ERROR = re.compile(r"'dict object' has no attribute '(\w+)'")
"""Jinja's error text if a template reads a field that a message does not have."""
_DEFAULT_CONTEXT_TOKENS = 1 << 17
_MAX_CHARS_PER_TOKEN = 32  # most tokens have about five characters, but a token may be a long run of spaces
_TEMPLATE_TEXT_ALLOWANCE_CHARS = 1 << 16  # added to the limit of a rendered text, for the text in the template


class ChatTemplate:
    """Renders conversations with one template, in a process that starts when it is first needed.

    Args:
        source: the Jinja template.
        special_tokens: values of template variables such as `bos_token`, by name.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.isolated = IsolatedFunction(_RENDERER_FUNCTION, Limits(MAX_RENDER_S, MAX_MEMORY_BYTES, MAX_CPU_S), setup=json.dumps(source))

    def check_compiles(self) -> None:
        """Check that the template compiles.

        Raises:
            CheckpointError: the template does not compile, or compiling exceeds the limits.
            BackendUnavailableError: the process cannot be started.
        """
        try:
            self.isolated.start()
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise _not_started_error(error) from error
            raise CheckpointError(f"the model's chat template cannot be compiled: {_error_reason(error)}; send plain prompts") from error

    def mentions_variable(self, name: str) -> bool:
        """Return whether the template's text contains the name of a variable. "tools" also matches the older name "functions"."""
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
            tools: functions that the model may call, in OpenAI's format.
            options: further variables of the template.
            max_model_len: maximum number of tokens of a prompt, which limits the length of the text (`max_rendered_chars`).

        Raises:
            RequestError: the messages are invalid, or the template rejects them, fails or exceeds a limit.
            BackendUnavailableError: the process cannot be started.
        """
        # One call of json.dumps for a long conversation would hold the GIL for too long.
        message_texts = [_dump_json("messages", partial(_normalized_message, message)) for message in messages]
        text = f"[{', '.join(message_texts)}]"
        tools_text, options_text = _dump_json("tools", lambda: list(tools) or None), _dump_json("options", lambda: options or {})
        num_input_chars = len(text) + (len(tools_text) if tools else 0) + (len(options_text) if options else 0)
        limit = max_rendered_chars(num_input_chars, max_model_len)
        settings = json.dumps({"add_generation_prompt": add_generation_prompt, "special_tokens": self._special_tokens, "max_chars": limit})
        conversation = f'{{"messages": {text}, "options": {options_text}, {settings[1:-1]}, "tools": '
        try:
            self.check_compiles()
            try:
                rendered: str = self.isolated.run(f"{conversation}{tools_text}}}")
            except IsolatedError as error:
                if tools or error.error_type != "TypeError":
                    raise
                rendered = self.isolated.run(f"{conversation}[]}}")  # some templates loop over `tools` even if it is None
        except CheckpointError as error:
            raise RequestError(str(error), parameter="messages") from error
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise _not_started_error(error) from error
            raise RequestError(f"the model's chat template rejects these messages: {_error_reason(error)}", parameter="messages") from error
        return rendered


def _error_reason(error: IsolatedError) -> str:
    if error.failure is not Failure.RAISED or error.error_type == "TemplateError":
        return str(error)
    if field := _MISSING_FIELD_ERROR.fullmatch(str(error)):
        return f"the field {field[1]!r} is missing"
    return f"{str(error) or 'it failed'} ({error.error_type})"


def max_rendered_chars(num_input_chars: int, max_model_len: int | None) -> int:
    """Return the maximum length of a rendered text: the sum of twice the input, 32 characters per token of the context, and a constant.

    Args:
        num_input_chars: length of the conversation as JSON.
        max_model_len: context length in tokens; None = 131,072.
    """
    return 2 * num_input_chars + _MAX_CHARS_PER_TOKEN * (max_model_len or _DEFAULT_CONTEXT_TOKENS) + _TEMPLATE_TEXT_ALLOWANCE_CHARS


def _normalized_message(message: object) -> dict[str, Any]:
    """Return a message without keys whose value is None, and with its reasoning under all names that templates use.

    Source: transformers, `apply_chat_template`. Deviation: a tuple becomes a list.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"{message!r} is not a message")
    fields = {str(key): value for key, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING_KEYS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _dump_json(name: str, make_value: Callable[[], object]) -> str:
    """Return the result of `make_value` as JSON. Errors become a RequestError about the parameter `name`."""
    try:
        return json.dumps(make_value(), default=_to_json_type)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} must be JSON values ({error}): send strings, numbers, lists and objects", parameter=name) from error


def _to_json_type(value: object) -> object:
    """Convert a value that JSON does not support: a mapping to a dict, a NumPy number to a Python number, others to their type name."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if isinstance(value, np.generic) else f"<{type(value).__name__}>"


def _not_started_error(error: IsolatedError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"chat templates are rendered in a separate process, but {sys.executable!r} cannot be started ({error}): send plain prompts, or "
        "run paceline in a Python that can start processes"
    )

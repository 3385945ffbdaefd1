"""A chat template: a conversation as the text its model was trained to see, made by an untrusted program within limits."""

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
"""Address space of a process that renders."""
CPU_SECONDS = 3
"""Of a processor's time for one conversation."""
WAIT_SECONDS = 10
"""For one conversation, however busy the machine is."""

_RENDERER = "paceline.tokenizer.template_process:renderer"
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEFAULT_CONTEXT = 1 << 17
_CHARACTERS_PER_TOKEN = 32  # text has four or five; room for long runs of spaces
_LEAST_CHARACTERS = 1 << 16


class ChatTemplate:
    """Renders one template, in a process that starts with the first conversation and ends with this object.

    Args:
        source: the Jinja template.
        names: what it may name besides the messages: the special tokens' texts.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)
        self.isolated = IsolatedFunction(_RENDERER, Limits(WAIT_SECONDS, MEMORY_BYTES, CPU_SECONDS), setup=json.dumps(source))

    def check(self) -> None:
        """Check that it compiles.

        Raises:
            CheckpointError: it cannot be compiled, or not within the limits.
            BackendUnavailableError: no process can be started.
        """
        try:
            self.isolated.start()
        except IsolatedError as error:
            if error.failure is Failure.NOT_STARTED:
                raise _not_started(error) from error
            raise CheckpointError(f"the model's chat template cannot be compiled: {_reason(error)}; send plain prompts") from error

    def mentions(self, name: str) -> bool:
        """Whether the template has a use for a variable, as far as its text shows. Tools are also given under an older name."""
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
        """The text of a conversation.

        Args:
            tools: functions that may be called, as OpenAI describes them.
            options: further variables of the template.
            max_model_len: tokens a prompt may have; limits how much text the template may add to what it was given (`most_characters`).

        Raises:
            RequestError: the messages are invalid, or the template rejects them, fails, or takes more time, memory or text than it may.
            BackendUnavailableError: no process can be started.
        """
        texts = [_json("messages", partial(_plain_message, message)) for message in messages]  # a single call would hold the GIL
        text = f"[{', '.join(texts)}]"
        tools_text, options_text = _json("tools", lambda: list(tools) or None), _json("options", lambda: options or {})
        given = len(text) + (len(tools_text) if tools else 0) + (len(options_text) if options else 0)
        most = most_characters(given, max_model_len)
        settings = json.dumps({"add_generation_prompt": add_generation_prompt, "names": self._names, "most": most})
        conversation = f'{{"messages": {text}, "options": {options_text}, {settings[1:-1]}, "tools": '
        try:
            self.check()
            try:
                rendered: str = self.isolated.run(f"{conversation}{tools_text}}}")
            except IsolatedError as error:
                if tools or error.error_type != "TypeError":
                    raise
                rendered = self.isolated.run(f"{conversation}[]}}")  # some templates loop over the tools without a check for none
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


def most_characters(given: int, max_model_len: int | None) -> int:
    """How long a rendered text may be: twice what was given, and 32 characters for each token of the context, and some.

    Args:
        given: characters of what the template is given, as JSON.
        max_model_len: None = 131,072 tokens.
    """
    return 2 * given + _CHARACTERS_PER_TOKEN * (max_model_len or _DEFAULT_CONTEXT) + _LEAST_CHARACTERS


def _plain_message(message: object) -> dict[str, Any]:
    """A message as templates are given it: keys without a value are absent, a reasoning text stands under all names it may have.

    Source: transformers, `apply_chat_template`. Deviation: a tuple reaches the template as a list.
    """
    if not isinstance(message, Mapping):
        raise TypeError(f"{message!r} is no message")
    given = {str(key): value for key, value in message.items() if value is not None}
    reasoning = next((given[name] for name in _REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _json(name: str, make: Callable[[], object]) -> str:
    """Raises RequestError: what `make` gives is no JSON."""
    try:
        return json.dumps(make(), default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} hold no plain values ({error}): send texts, numbers and lists of them", parameter=name) from error


def _plain(value: object) -> object:
    """For what JSON cannot hold: mappings become dicts, numpy's numbers Python's, anything else the name of its type."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if isinstance(value, np.generic) else f"<{type(value).__name__}>"


def _not_started(error: IsolatedError) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"chat templates are rendered in a process of their own, and {sys.executable!r} cannot be started for it ({error}): "
        "send plain prompts, or run paceline in a Python that can start others"
    )

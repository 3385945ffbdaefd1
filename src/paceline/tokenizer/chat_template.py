"""A chat template: a conversation as the text its model was trained to see, made by an untrusted program within limits."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.errors import BackendUnavailableError, CheckpointError, RequestError

MEMORY_BYTES = 512 << 20
"""Address space of a process that renders."""
CPU_SECONDS = 3
"""Of a processor's time for one conversation."""
WAIT_SECONDS = 10
"""For one conversation, however busy the machine is."""

_PROGRAM = Path(__file__).with_name("template_process.py")
_LIBRARIES = ("jinja2", "markupsafe")
_START = "import runpy, sys; sys.path += sys.argv[5:]; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
_LATE, _BROKEN = 1, 3  # exit codes of template_process.py
_TOO_LARGE = f"it needed more than the {MEMORY_BYTES >> 20} MB it may have"
_LEAVE_RUINS = ("MemoryError", "RecursionError")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_CHUNK_BYTES = 1 << 16
_DEFAULT_CONTEXT = 1 << 17
_CHARACTERS_PER_TOKEN = 32  # text has four or five; room for long runs of spaces
_LEAST_CHARACTERS = 1 << 16


class ChatTemplate:
    """Renders one template.

    The process that renders (`template_process.py`) starts with the first conversation, ends when this object does or when it exceeds its
    limits, and is started again for the next one. Threads take turns. A forked process gets one of its own.

    Args:
        source: the Jinja template.
        names: what it may name besides the messages: the special tokens' texts.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = dict(names)
        self._is_watched = False
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def check(self) -> None:
        """Check that it compiles.

        Raises:
            CheckpointError: it cannot be compiled, or not within the limits.
            BackendUnavailableError: no process can be started.
        """
        with self._lock:
            self._started()

    def mentions(self, name: str) -> bool:
        """Whether the template has a use for a variable, as far as its text shows."""
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool,
        max_context: int | None = None,
    ) -> str:
        """The text of a conversation.

        Args:
            tools: functions that may be called, as OpenAI describes them.
            options: further variables of the template.
            max_context: tokens a prompt may have; limits how much text the template may add to what it was given (`most_characters`).

        Raises:
            RequestError: the messages are invalid, or the template rejects them, fails, or takes more time, memory or text than it may.
            BackendUnavailableError: no process can be started.
        """
        texts = [_json("messages", partial(_plain_message, message)) for message in messages]  # a single call would hold the GIL
        text = f"[{', '.join(texts)}]"
        tools_text, options_text = _json("tools", lambda: list(tools) or None), _json("options", lambda: options or {})
        given = len(text) + (len(tools_text) if tools else 0) + (len(options_text) if options else 0)
        most = most_characters(given, max_context)
        settings = json.dumps({"add_generation_prompt": add_generation_prompt, "names": self._names, "most": most})
        question = f'{{"messages": {text}, "tools": {tools_text}, "options": {options_text}, {settings[1:]}'
        try:
            with self._lock:
                return self._asked(self._started(), question)["text"]
        except CheckpointError as error:
            raise RequestError(str(error), parameter="messages") from error
        except _RefusedError as error:
            raise RequestError(f"the model's chat template rejects these messages: {error}", parameter="messages") from error

    def _asked(self, running: "_Running", question: str) -> dict[str, str]:
        """The process's answer; the process is ended if it could not answer the next question."""
        try:
            running.send(question)
            return running.answer()
        except BaseException as error:
            if not isinstance(error, _RefusedError) or error.ends:
                self._close()
            raise

    def _started(self) -> "_Running":
        """The process, with the template in it."""
        if self._running is not None and self._running.process.poll() is None:
            return self._running
        self._close()
        process = _new_process()
        running = self._running = _Running(process, weakref.finalize(self, _end, process))
        self._watch_forks()
        try:
            running.send(json.dumps({"template": self._source}))  # sent while it starts
            running.answer()
        except BaseException as error:
            self._close()
            if not isinstance(error, _RefusedError):
                raise
            raise _not_running(str(error)) from error
        try:
            running.answer()
        except BaseException as error:
            self._close()
            if not isinstance(error, _RefusedError):
                raise
            raise CheckpointError(f"the model's chat template cannot be compiled: {error}; send plain prompts") from error
        return running

    def _close(self) -> None:
        if self._running is not None:
            self._running.end()
            self._running = None

    def _watch_forks(self) -> None:
        if hasattr(os, "register_at_fork") and not self._is_watched:
            known = weakref.WeakMethod(self._forget_parents)
            os.register_at_fork(after_in_child=lambda: (forget := known()) is None or forget())
            self._is_watched = True

    def _forget_parents(self) -> None:
        """In a forked process: leave the parent's process alone, and make a new lock, as the thread that held the old one is not here."""
        if self._running is not None:
            self._running.leave()
            self._running = None
        self._lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Running:
    """A process; `end` ends it, and is called when its template is no longer used. `pending`: answers read together with an earlier one."""

    process: "subprocess.Popen[bytes]"
    end: "weakref.finalize[Any, ChatTemplate]"
    pending: bytearray = field(default_factory=bytearray)

    def send(self, question: str) -> None:
        """Raises _RefusedError: it has ended."""
        assert self.process.stdin is not None
        rest = memoryview(question.encode() + b"\n")
        try:
            while rest:
                rest = rest[os.write(self.process.stdin.fileno(), rest) :]
        except OSError:
            raise _RefusedError(self._why_it_ended(), ends=True) from None

    def answer(self) -> dict[str, str]:
        """Raises _RefusedError: it says no, or has ended."""
        assert self.process.stdout is not None
        num_searched = 0
        while (end := self.pending.find(b"\n", num_searched)) < 0:
            num_searched = len(self.pending)
            read = os.read(self.process.stdout.fileno(), _CHUNK_BYTES)
            if not read:
                raise _RefusedError(self._why_it_ended(), ends=True)
            self.pending.extend(read)
        found: dict[str, str] = json.loads(self.pending[:end])
        del self.pending[: end + 1]
        if "error" in found:
            raise _RefusedError(_problem(found["error"], found["message"]), ends=found["error"] in _LEAVE_RUINS)
        return found

    def leave(self) -> None:
        """Let it go on for another process that has it."""
        self.end.detach()
        _close_pipes(self.process)
        self.process.returncode = 0  # not our child: never waited for here

    def _why_it_ended(self) -> str:
        code = self.process.wait()
        if code == _LATE:
            return f"it took longer than {WAIT_SECONDS} seconds"
        if code == _BROKEN:
            return _TOO_LARGE
        if code == -getattr(signal, "SIGXCPU", 0):
            return f"it computed longer than {CPU_SECONDS} seconds"
        return f"its process ended with code {code}"


def _problem(kind: str, message: str) -> str:
    if kind == "MemoryError":
        return _TOO_LARGE
    return message if kind == "TemplateError" else f"{message or 'it failed'} ({kind})"


class _RefusedError(Exception):
    """The process has no text, and says why; `ends`: it cannot be asked again."""

    def __init__(self, reason: str, *, ends: bool) -> None:
        super().__init__(reason)
        self.ends = ends


def most_characters(given: int, max_context: int | None) -> int:
    """How long a rendered text may be: twice what was given, and 32 characters for each token of the context, and some.

    Args:
        given: characters of what the template is given, as JSON.
        max_context: None = 131,072 tokens.
    """
    return 2 * given + _CHARACTERS_PER_TOKEN * (max_context or _DEFAULT_CONTEXT) + _LEAST_CHARACTERS


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


def _new_process() -> "subprocess.Popen[bytes]":
    if getattr(sys, "frozen", False):  # the executable is no Python, but the program we are part of
        raise _not_running("it is one program with paceline")
    limits = map(str, (MEMORY_BYTES, CPU_SECONDS, WAIT_SECONDS))
    command = [sys.executable or "", "-I", "-S", "-c", _START, str(_PROGRAM), *limits, *_library_paths()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
    try:
        return start(command, bufsize=0, start_new_session=True, **pipes)  # Ctrl-C must not reach it
    except (OSError, ValueError) as error:
        raise _not_running(str(error)) from error


def _not_running(problem: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"chat templates are rendered by a process of their own, and {sys.executable!r} cannot be started for it ({problem}): "
        "send plain prompts, or run paceline in a Python that can start others"
    )


def _library_paths() -> list[str]:
    """The folders the process finds its libraries in: it looks nowhere else."""
    specs = [importlib.util.find_spec(name) for name in _LIBRARIES]
    return list(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None))


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    _close_pipes(process)
    process.wait()


def _close_pipes(process: "subprocess.Popen[bytes]") -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()

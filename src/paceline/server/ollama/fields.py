"""The fields of Ollama's requests, and what of them is refused."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from paceline.server.fields import Fields, SpeculationFields
from paceline.server.http_errors import HttpError

_TEXT_ONLY = "this server reads and writes text only"
_OFF = {"mirostat": 0, "tfs_z": 1, "typical_p": 1, "repeat_last_n": -1, "penalize_newline": True}


class Options(Fields):
    """How tokens are chosen. What says how a model is loaded is taken and not used: it is loaded already.

    `num_ctx` must fit into the context there is; penalties look at the whole text, so that `repeat_last_n` may only be -1.
    """

    num_predict: int | None = None
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_last_n: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    penalize_newline: bool | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        for name, harmless in _OFF.items():
            if getattr(self, name) not in (None, harmless):
                text = f"{within}.{name} is served only as {json.dumps(harmless)}: leave it out"
                raise HttpError(400, text, parameter=f"{within}.{name}", code="unsupported_parameter")


class RequestFields(Fields):
    """What chats and single prompts have in common. `keep_alive` says nothing about the text."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    speculation: SpeculationFields | None = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        if self.options is not None:
            self.options.check_refused("options")
        if self.top_logprobs and not self.logprobs:
            raise HttpError(400, "top_logprobs needs logprobs=true: send both, or none", parameter="top_logprobs", code="invalid_value")

    @property
    def shows_origins(self) -> bool:
        """Whether the answer says who guessed each token."""
        return self.speculation is not None and self.speculation.origins


class GenerateFields(RequestFields):
    """The body of `/api/generate`."""

    refused: ClassVar[Mapping[str, str]] = {
        "suffix": "the model continues a text, it fills no gap",
        "template": "the model has its own; send raw=true with a text that is rendered already",
        "context": "send the conversation to /api/chat",
        "images": _TEXT_ONLY,
        "width": _TEXT_ONLY,
        "height": _TEXT_ONLY,
        "steps": _TEXT_ONLY,
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    context: Any = None
    images: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None

    def check_refused(self, within: str = "") -> None:
        for name in ("suffix", "template"):  # clients send empty ones
            if getattr(self, name) == "":
                setattr(self, name, None)
        super().check_refused(within)
        if self.raw and self.system:
            raise HttpError(400, "system is no part of a raw prompt: write it into the prompt", parameter="system", code="invalid_value")


class ChatFields(RequestFields):
    """The body of `/api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class ShowFields(Fields):
    """The body of `/api/show`; `verbose` is taken, there is no more to say."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None

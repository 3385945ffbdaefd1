"""The fields that OpenAI's requests for text share, and what of them is refused."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from paceline.server.http_errors import HttpError


class Fields(BaseModel):
    """A JSON object whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Fields):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class SpeculationFields(Fields):
    """How a request may be drafted for, and what the answer says of it; none of it changes a token. `trees` brings the origins along."""

    enabled: bool = True
    drafter: str | None = None
    max_draft_tokens: int | None = None
    origins: bool = False
    trees: bool = False

    @model_validator(mode="after")
    def _bring_origins(self) -> "SpeculationFields":
        self.origins = self.origins or self.trees
        return self


class ResponseFormat(BaseModel):
    """What the text must be."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class TextFields(Fields):
    """What chats and completions have in common. Fields that say nothing about the text (`user`, `metadata`) are taken and not used."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of OpenAI's that are not served, with the reason; "nothing" (null, false, an empty list) is let through."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    speculation: SpeculationFields | None = None
    user: str | None = None

    def check_refused(self) -> None:
        """That nothing is asked for that is not served.

        Raises:
            HttpError: 400, by name.
        """
        for name, reason in self.refused.items():
            if getattr(self, name) not in (None, False, [], {}):
                raise HttpError(400, f"{name} is not served: {reason}", parameter=name, code="unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options are for streams: send stream=true, or leave them out", parameter="stream_options")

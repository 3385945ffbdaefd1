"""The fields that OpenAI's requests for text share, and what of them is refused."""

from typing import Any, Literal

from paceline.server.fields import Fields, SamplingFields
from paceline.server.http_errors import HttpError


class StreamOptions(Fields):
    """How an answer is streamed."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Fields):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class TextFields(SamplingFields):
    """What chats and completions have in common. Fields that say nothing about the text (`user`, `metadata`) are taken and not used."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    def check_refused(self, within: str = "") -> None:
        super().check_refused(within)
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options are for streams: send stream=true, or leave them out", parameter="stream_options")

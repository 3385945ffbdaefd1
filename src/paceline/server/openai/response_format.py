"""OpenAI's `response_format`: what holds an answer to JSON."""

from paceline.sampling.grammar import Grammar
from paceline.server.openai.fields import ResponseFormat
from paceline.server.parameters import schema_grammar
from paceline.server.settings import ServerSettings


def response_grammar(wanted: ResponseFormat | None, settings: ServerSettings) -> Grammar | None:
    """The grammar of an answer; None = any text.

    Raises:
        HttpError, RequestError: there is no schema, or one that cannot be used.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Grammar.json_object()
    return schema_grammar("response_format", (wanted.json_schema or {}).get("schema"), settings)

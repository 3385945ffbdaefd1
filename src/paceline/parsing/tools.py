"""The functions that a model may call."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: JSON schema of the object that its arguments are; None = it takes none.
        strict: whether a grammar makes the arguments match the schema.
        place: the path of the schema in the request, for errors; empty = none.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    place: str = ""

    def as_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it, which is as OpenAI describes it."""
        described = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {name: value for name, value in described.items() if value is not None}}


class ToolUse(Enum):
    NONE = "none"  # the prompt has no tools
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one call; `ChatRequest.tool_name` may name the tool

"""A conversation as chat templates know it, put together from what dialects send piece by piece."""

from collections.abc import Iterable
from typing import Any

from paceline.server.http_errors import HttpError


class Turns:
    """Collects a conversation. What one role says in a row is one turn; so are an answer's reasoning, its texts and its calls."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []
        self._call_names: dict[str, str] = {}

    def say(self, role: str, texts: Iterable[str]) -> None:
        """Texts of "system", "user" or "assistant"."""
        self._turn(role)["content"] += [{"type": "text", "text": text} for text in texts]

    def think(self, text: str) -> None:
        """What was thought before an answer's next text."""
        turn = self._turn("assistant")
        turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        """An answer calls a tool; its arguments are an object or the text of one."""
        function = {"name": name, "arguments": arguments}
        self._turn("assistant").setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._call_names[call_id] = name

    def result(self, place: str, call_id: str, texts: Iterable[str]) -> None:
        """What a called tool gave.

        Args:
            place: the field that holds `call_id`.

        Raises:
            HttpError: there is no such call in what was said before.
        """
        if call_id not in self._call_names:
            raise HttpError(400, f"{place} names no call in front of it: send the call too", parameter=place, code="invalid_value")
        content = [{"type": "text", "text": text} for text in texts]
        self._turns.append({"role": "tool", "tool_call_id": call_id, "name": self._call_names[call_id], "content": content})

    @property
    def last_role(self) -> str | None:
        """Whose turn the last one is."""
        return self._turns[-1]["role"] if self._turns else None

    def messages(self) -> list[dict[str, Any]]:
        """All of it; a content of one text is that text."""
        return [{**turn, "content": _plain(turn["content"])} for turn in self._turns]

    def _turn(self, role: str) -> dict[str, Any]:
        if self.last_role != role:
            self._turns.append({"role": role, "content": []})
        return self._turns[-1]


def _plain(content: list[dict[str, str]]) -> str | list[dict[str, str]]:
    if len(content) > 1:
        return content
    return content[0]["text"] if content else ""

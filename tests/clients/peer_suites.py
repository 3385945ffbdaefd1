"""Reads llama.cpp's parser tests out of its sources: what a model wrote, and what llama.cpp makes of it.

The tests are chains of C++ calls (`tst.test("…").tools({…}).expect(…)`). One whose expressions need more than literals is left out and
counted.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*|/\*.*?\*/)
    |R"(?P<mark>[^(\s"]{0,16})\((?P<raw>.*?)\)(?P=mark)"
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<char>'(?:[^'\\]|\\.)+')
    |(?P<number>-?\d[\w.]*)
    |(?P<name>[A-Za-z_]\w*(?:::\w+)*)
    |(?P<other>:=|.)""",
    re.DOTALL | re.VERBOSE,
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_CONVERSIONS: dict[str, Any] = {
    "std::string": "",
    "json": "",
}
"""Functions that return their argument, with the value that they return without one."""


class UnreadableError(Exception):
    """An expression that is more than literals and known names."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str


@dataclass(slots=True)
class SuiteCase:
    """One test of another project.

    Attributes:
        template: file of the chat template it is about.
        tools: by name, the schema of the arguments.
        content, reasoning: None = not compared.
        calls: name and arguments; None = not compared.
    """

    suite: str
    title: str
    template: str
    output: str
    tools: dict[str, Any] = field(default_factory=dict)
    content: str | None = ""
    reasoning: str | None = ""
    calls: list[tuple[str, Any]] | None = field(default_factory=list)
    thinks: bool | None = None
    parallel: bool = False


@dataclass(slots=True)
class Suite:
    """The tests that could be read, and how many could not."""

    cases: list[SuiteCase] = field(default_factory=list)
    num_left_out: int = 0


def tokens_of(source: str) -> list[Token]:
    """Split C++ source into tokens, without comments and blanks."""
    found = []
    for match in _TOKEN.finditer(source):
        if match["raw"] is not None:
            found.append(Token("string", match["raw"]))
        elif match["string"] is not None:
            found.append(Token("string", _unescaped(match["string"])))
        elif match["space"] is None:
            kind = str(match.lastgroup)
            found.append(Token(kind, match[0]))
    return found


def _unescaped(literal: str) -> str:
    def character(match: re.Match[str]) -> str:
        one = match[1]
        if one[0] in "xuU01234567" and len(one) > 1:
            return chr(int(one.lstrip("xuU"), 8 if one[0] in "01234567" else 16))
        return {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b", "f": "\f"}.get(one, one)

    return re.sub(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{3}|.)", character, literal[1:-1], flags=re.DOTALL)


def balanced(tokens: list[Token], start: int) -> int:
    """The index after the bracket that closes the one at `start`."""
    open_ends: list[str] = []
    for index in range(start, len(tokens)):
        token = tokens[index]
        if token.kind == "other" and token.text in _CLOSING:
            open_ends.append(_CLOSING[token.text])
        elif token.kind == "other" and open_ends and token.text == open_ends[-1]:
            open_ends.pop()
            if not open_ends:
                return index + 1
    raise UnreadableError("a bracket is not closed")


class Expression:
    """Evaluates literals, sums of texts, lists and calls of known functions."""

    def __init__(self, tokens: list[Token], names: Mapping[str, Any]) -> None:
        self._tokens, self._names, self.at = tokens, names, 0

    def value(self) -> Any:
        found = self._one()
        while self._next() == "+":
            self.at += 1
            found = found + self._one()
        return found

    def values(self, end: str) -> list[Any]:
        """The values up to a closing bracket; of `key: value` a pair in a dictionary."""
        found: list[Any] = []
        pairs: dict[str, Any] = {}
        while self._next() != end:
            if self._next() == ".":  # C++: .name = value
                self.at += 2
                self._expect("=")
                found.append(self.value())
            else:
                one = self._key() if self._is_key() else self.value()
                if self._next() == ":":
                    self.at += 1
                    pairs[str(one)] = self.value()
                else:
                    found.append(one)
            if self._next() == ",":
                self.at += 1
        self.at += 1
        return [pairs] if pairs and not found else found

    def _is_key(self) -> bool:
        following = self._tokens[self.at : self.at + 2]
        return len(following) == 2 and following[0].kind == "name" and following[1].text == ":"

    def _key(self) -> str:
        self.at += 1
        return self._tokens[self.at - 1].text

    def _next(self) -> str:
        if self.at >= len(self._tokens):
            return ""
        token = self._tokens[self.at]
        return token.text if token.kind == "other" else f"\0{token.kind}"

    def _expect(self, text: str) -> None:
        if self._next() != text:
            raise UnreadableError(text)
        self.at += 1

    def _one(self) -> Any:
        if self.at >= len(self._tokens):
            raise UnreadableError("nothing")
        token = self._tokens[self.at]
        self.at += 1
        if token.kind == "string":
            text = token.text
            while self.at < len(self._tokens) and self._tokens[self.at].kind == "string":
                text += self._tokens[self.at].text
                self.at += 1
            return text
        if token.kind == "number":
            return json.loads(token.text)
        if token.text == "{":
            return self._struct_or_list()
        if token.text == "(":
            found = self.value()
            self._expect(")")
            return found
        if token.text in ("&", "*"):
            return self._one()
        if token.kind == "name":
            return self._named(token.text)
        raise UnreadableError(token.text)

    def _struct_or_list(self) -> Any:
        """After an opening brace: a dictionary of `key: value`, or a list."""
        found = self.values("}")
        return found[0] if len(found) == 1 and isinstance(found[0], dict) and found[0] else found

    def _named(self, name: str) -> Any:
        if name in ("true", "false", "nil", "nullptr"):
            return {"true": True, "false": False}.get(name)
        while self._next() == "." and self._tokens[self.at + 1].kind == "name":
            name += "." + self._tokens[self.at + 1].text
            self.at += 2
        if self._next() == "(":
            self.at += 1
            arguments = self.values(")")
            if name in _CONVERSIONS:
                return arguments[0] if arguments else _CONVERSIONS[name]
            if name in self._names and callable(self._names[name]):
                return self._names[name](*arguments)
            raise UnreadableError(name)
        if self._next() == "{" and name not in self._names:
            self.at += 1
            return self._struct_or_list()
        if name in self._names:
            return self._names[name]
        raise UnreadableError(name)


def evaluated(tokens: list[Token], names: Mapping[str, Any]) -> Any:
    """The value of an expression.

    Raises:
        UnreadableError: it needs more than literals and known names.
    """
    expression = Expression(tokens, names)
    try:
        found = expression.value()
    except (IndexError, TypeError, ValueError) as error:
        raise UnreadableError(str(error)) from error
    if expression.at < len(tokens):
        raise UnreadableError(f"more follows: {tokens[expression.at].text}")
    return found


# llama.cpp


def _message(content: str, reasoning: str = "", name: str = "", arguments: str = "", call_id: str = "") -> dict[str, Any]:
    return {"content": content, "reasoning": reasoning, "calls": [[name, arguments, call_id]] if name or call_id else []}


def _several(reasoning: str, content: str, calls: list[list[str]]) -> dict[str, Any]:
    return {"content": content, "reasoning": reasoning, "calls": calls}


_FUNCTIONS: dict[str, Any] = {
    "simple_assist_msg": _message,
    "message_with_tool_calls": lambda name, arguments: _message("", "", name, arguments),
    "message_with_tool_calls_and_reasoning": lambda name, arguments, reasoning: _message("", reasoning, name, arguments),
    "message_with_reasoning_content_and_multiple_tool_calls": _several,
    "message_with_content_and_tool_call": lambda content, name, arguments: _message(content, "", name, arguments),
    "message_with_reasoning_and_tool_call": lambda reasoning, name, arguments: _message("", reasoning, name, arguments),
}


def llama_cpp_suite(folder: Path) -> Suite:
    """The tests of `tests/test-chat.cpp` of llama.cpp's sources."""
    tokens = tokens_of((folder / "tests/test-chat.cpp").read_text())
    names: dict[str, Any] = dict(_FUNCTIONS)
    suite, templates = Suite(), dict[str, list[str]]()
    lfm2 = sorted(path.name for path in (folder / "models/templates").glob("LFM2*"))
    at = 0
    while at < len(tokens) - 4:
        window = [token.text for token in tokens[at : at + 4]]
        if window[1] == "=" and tokens[at].kind == "name" and tokens[at - 1].kind in ("name", "other"):
            _learn(tokens, at, names)
            if window[2] == "peg_tester" and window[3] == "(":
                path = tokens[at + 4]
                templates[window[0]] = [Path(path.text).name] if path.kind == "string" else lfm2 if path.text == "template_path" else []
        elif tokens[at].kind == "name" and window[1] == "{" and tokens[at - 1].text == "common_chat_tool":
            _learn_tool(tokens, at, names)
        elif window[1:] == [".", "test", "("] and tokens[at].kind == "name":
            at = _read_chain(tokens, at, templates.get(window[0], []), names, suite)
            continue
        at += 1
    return suite


def _learn(tokens: list[Token], at: int, names: dict[str, Any]) -> None:
    end = at + 2
    while end < len(tokens) and tokens[end].text != ";":
        end = balanced(tokens, end) if tokens[end].kind == "other" and tokens[end].text in _CLOSING else end + 1
    try:
        names[tokens[at].text] = evaluated(tokens[at + 2 : end], names)
    except UnreadableError:
        names.pop(tokens[at].text, None)


def _learn_tool(tokens: list[Token], at: int, names: dict[str, Any]) -> None:
    try:
        name, _, schema = Expression(tokens[at + 1 : balanced(tokens, at + 1)], names).value()[:3]
        names[tokens[at].text] = (name, json.loads(schema) if schema else {})
    except (UnreadableError, ValueError):
        names.pop(tokens[at].text, None)


def _read_chain(tokens: list[Token], at: int, templates: list[str], names: dict[str, Any], suite: Suite) -> int:
    """Read `x.test(…).a(…).b(…).run()`; returns the index after it."""
    calls: dict[str, list[Token]] = {}
    at += 1
    while at + 2 < len(tokens) and tokens[at].text == "." and tokens[at + 2].text == "(":
        end = balanced(tokens, at + 2)
        calls[tokens[at + 1].text] = tokens[at + 3 : end - 1]
        at = end
    if "run" not in calls or {"is_partial", "messages", "continue_final_message"} & calls.keys() or not templates:
        suite.num_left_out += "run" in calls
        return at
    try:
        for template in templates:
            suite.cases.append(_llama_case(calls, template, names))
    except (UnreadableError, ValueError):
        suite.num_left_out += 1
    return at


def _llama_case(calls: Mapping[str, list[Token]], template: str, names: Mapping[str, Any]) -> SuiteCase:
    output = evaluated(calls["test"], names)
    expected = evaluated(calls["expect"], names) if "expect" in calls else _message("")
    for key, name in (("content", "expect_content"), ("reasoning", "expect_reasoning"), ("calls", "expect_tool_calls")):
        if name in calls:
            expected = {**expected, key: evaluated(calls[name], names)}
    tools = evaluated(calls["tools"], names) if "tools" in calls else []
    if not isinstance(output, str) or any(not isinstance(one, tuple) for one in tools):
        raise UnreadableError("tools")
    reads_reasoning = any(token.text.endswith("_AUTO") or token.text.endswith("_DEEPSEEK") for token in calls.get("reasoning_format", ()))
    return SuiteCase(
        "llama.cpp",
        output[:60],
        template,
        output,
        dict(tools),
        expected["content"],
        expected["reasoning"] if reads_reasoning else None,
        [(call[0], json.loads(call[1] or "{}")) for call in expected["calls"]],
        evaluated(calls["enable_thinking"], names) if "enable_thinking" in calls else None,
        "parallel_tool_calls" in calls,
    )

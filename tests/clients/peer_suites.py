"""Reads the parser tests of other projects out of their sources: what a model wrote, and what that project makes of it.

llama.cpp's tests are chains of C++ calls (`tst.test("…").tools({…}).expect(…)`), Ollama's are tables of Go literals. One small reader of
C-like expressions reads both. A test whose expressions need more than literals is left out and counted.
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
    |`(?P<goraw>[^`]*)`
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<char>'(?:[^'\\]|\\.)+')
    |(?P<number>-?\d[\w.]*)
    |(?P<name>[A-Za-z_]\w*(?:::\w+)*)
    |(?P<other>:=|.)""",
    re.DOTALL | re.VERBOSE,
)
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_CONVERSIONS: dict[str, Any] = {
    **dict.fromkeys(("std::string", "json", "string"), ""),
    **dict.fromkeys(("int64", "float64", "int"), 0),
    **{name: {} for name in ("args", "testArgs", "testPropsMap", "api.NewToolCallFunctionArguments")},
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
        template: file of the chat template it is about (llama.cpp), or the parser's name (Ollama).
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
    """Split C++ or Go source into tokens, without comments and blanks."""
    found = []
    for match in _TOKEN.finditer(source):
        if match["raw"] is not None:
            found.append(Token("string", match["raw"]))
        elif match["goraw"] is not None:
            found.append(Token("string", match["goraw"]))
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
    """Evaluates literals, sums of texts, lists, Go's composite literals and calls of known functions."""

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
        if token.text == "[":  # Go: []type{…}
            self.at = self._tokens.index(Token("other", "]"), self.at) + 1
            return self._typed()
        if token.kind == "name":
            return self._named(token.text)
        raise UnreadableError(token.text)

    def _struct_or_list(self) -> Any:
        """After an opening brace: a dictionary of `key: value`, or a list."""
        found = self.values("}")
        return found[0] if len(found) == 1 and isinstance(found[0], dict) and found[0] else found

    def _typed(self) -> Any:
        """After the brackets of a Go type: its name, then its values."""
        while self._next() != "{":
            if self._next() == "[":
                self.at = balanced(self._tokens, self.at)
            elif [token.text for token in self._tokens[self.at : self.at + 3]] == ["interface", "{", "}"]:
                self.at += 3
            else:
                self.at += 1
            if self.at >= len(self._tokens):
                raise UnreadableError("type")
        self.at += 1
        return self.values("}")

    def _named(self, name: str) -> Any:
        if name in ("true", "false", "nil", "nullptr"):
            return {"true": True, "false": False}.get(name)
        while self._next() == "." and self._tokens[self.at + 1].kind == "name":
            name += "." + self._tokens[self.at + 1].text
            self.at += 2
        if name in ("map", "[]"):
            found = self._typed()
            return found[0] if found else {}
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
            found = self._struct_or_list()
            return {**found, "event": name} if "Event" in name and isinstance(found, dict) else found
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


# Ollama

OLLAMA_PARSERS = {
    "cogito": ("deepseek_v3", "qwen3"),
    "deepseek3": ("deepseek_v3", "qwen3"),
    "functiongemma": ("functiongemma", "none"),
    "gemma4": ("gemma4", "gemma4"),
    "glm46": ("glm45", "qwen3"),
    "lfm2": ("lfm2", "qwen3"),
    "nemotron3nano": ("qwen3_coder", "qwen3"),
    "olmo3": ("olmo3", "none"),
    "olmo3_think": ("none", "qwen3"),
    "qwen3coder": ("qwen3_coder", "none"),
    "qwen3vl_nonthinking": ("hermes", "none"),
    "qwen3vl_thinking": ("hermes", "qwen3"),
}
"""Our parsers for each of Ollama's."""
_MARKS = {
    "glm46": ("<tool_call>", "</tool_call>"),
    "qwen3coder": ("<tool_call>", "</tool_call>"),
    "qwen3vl_nonthinking": ("<tool_call>", "</tool_call>"),
    "qwen3vl_thinking": ("<tool_call>", "</tool_call>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": ("<function_calls>", "</function_calls>"),
    "deepseek3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    "cogito": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
}
"""The marks around calls, for tests that give only what is between them."""
_BEGINS_IN_REASONING = ("nemotron3nano", "olmo3_think", "qwen3vl_thinking")
_SETTINGS = ("thinkingEnabled", "hasThinking", "hasThinkingSupport")
_GO_NAMES = {"tool": lambda name, properties: {"Function": {"Name": name, "Parameters": {"Properties": properties}}}}
_CALL_KEYS = ("expectedCalls", "expectedToolCalls")


def ollama_suite(folder: Path) -> Suite:
    """The tables of `model/parsers/*_test.go` of Ollama's sources."""
    suite = Suite()
    for name in OLLAMA_PARSERS:
        tokens = tokens_of((folder / f"model/parsers/{name}_test.go").read_text())
        for at in range(len(tokens) - 6):
            is_table = [token.text for token in tokens[at : at + 3]] == [":=", "[", "]"] and tokens[at + 4].text == "{"
            if is_table:
                start = balanced(tokens, at + 4) if tokens[at + 3].text == "struct" else at + 4
                if start < len(tokens) and tokens[start].text == "{":
                    _read_table(tokens[start : balanced(tokens, start)], name, suite)
    return suite


def _read_table(tokens: list[Token], parser: str, suite: Suite) -> None:
    at = 1
    while at < len(tokens) - 1:
        if tokens[at].text != "{":
            at += 1
            continue
        end = balanced(tokens, at)
        try:
            found = Expression(tokens[at:end], _GO_NAMES).value()
            case = _ollama_case(found, parser) if isinstance(found, dict) else None
            if case is not None:
                suite.cases.append(case)
            suite.num_left_out += case is None
        except (UnreadableError, IndexError, TypeError, ValueError, KeyError):
            suite.num_left_out += 1
        at = end


def _ollama_case(row: Mapping[str, Any], parser: str) -> SuiteCase | None:
    """Return the test of a row; None if it is not about an answer, or about an error."""
    if row.get("expectError") or row.get("wantErr"):
        return None
    title = str(row.get("name") or row.get("desc"))
    if "paramType" in row and parser == "qwen3coder":
        return _value_case(row, title)
    if "steps" in row:
        return _steps_case(row, parser, title)
    opening, closing = _MARKS.get(parser, ("", ""))
    inner = row.get("rawToolCall", row.get("content") if "expected" in row else row.get("input") if "expected" in row else None)
    wanted = row.get("wantToolCall", row.get("expected"))
    if inner is not None and wanted is not None and opening:
        calls = _calls(wanted if isinstance(wanted, list) else [wanted])
        return SuiteCase("ollama", title, parser, f"{opening}{inner}{closing}", _tools(row, calls), None, None, calls)
    given = row.get("input", "".join(row["chunks"]) if row.get("chunks") else None)
    if not isinstance(given, str) or not {"expectedContent", "expectedText", "expectedThinking", *_CALL_KEYS} & row.keys():
        return None
    calls = _calls(next((row[key] for key in _CALL_KEYS if row.get(key)), []))
    content = row.get("expectedContent", row.get("expectedText", ""))
    thinks, reasoning = _begins_in_reasoning(row, parser), row.get("expectedThinking", "")
    if parser == "gemma4" and "call:get_weather" in given and not set(_CALL_KEYS) & row.keys():  # a table of texts around calls
        return SuiteCase("ollama", title, parser, given, {"get_weather": {}}, content, reasoning, None, thinks, True)
    return SuiteCase("ollama", title, parser, given, _tools(row, calls), content, reasoning, calls, thinks, True)


def _begins_in_reasoning(row: Mapping[str, Any], parser: str) -> bool:
    """Return whether the text of a row begins within reasoning."""
    if parser in ("lfm2", "gemma4"):
        return False
    if (
        str(row.get("desc")).startswith("thinking prefill") or row.get("prefillMsg") or (row.get("lastMessage") or {}).get("Content")
    ):  # a part of the answer is in the prompt
        return False
    if "thinkValue" in row:
        return bool((row["thinkValue"] or {}).get("Value"))
    setting = next((bool(row[key]) for key in _SETTINGS if key in row), None)
    if parser == "cogito" and setting is None:  # as its test derives the setting
        return bool(row.get("expectedThinking")) and not row.get("tools")
    return parser in _BEGINS_IN_REASONING if setting is None else setting


def _steps_case(row: Mapping[str, Any], parser: str, title: str) -> SuiteCase | None:
    """Return the test of pieces of text with the events that each gives; None if there are calls, whose bodies these tests do not parse."""
    if title.startswith("thinking prefill"):  # the prompt is not in the row
        return None
    events = [event for step in row["steps"] for event in step.get("wantEvents") or []]
    if any("content" not in event for event in events):
        return None
    reasoning = "".join(event["content"] for event in events if "Thinking" in event["event"])
    content = "".join(event["content"] for event in events if "Thinking" not in event["event"])
    given = "".join(step["input"] for step in row["steps"])
    return SuiteCase("ollama", title, parser, given, {"f": {}}, content, reasoning, [], _begins_in_reasoning(row, parser))


def _value_case(row: Mapping[str, Any], title: str) -> SuiteCase:
    """Return the test of the conversion of one value."""
    output = f"<tool_call>\n<function=f>\n<parameter=x>{row['raw']}</parameter>\n</function>\n</tool_call>"
    properties = {"x": {"type": row["paramType"]}} if row["paramType"] else {}
    tools = {"f": {"type": "object", "properties": properties}}
    return SuiteCase("ollama", title, "qwen3coder", output, tools, None, None, [("f", {"x": row.get("want")})])


def _calls(rows: list[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    calls = [(row["Function"]["Name"], row["Function"].get("Arguments") or {}) for row in rows]
    return [(name, json.loads(given) if isinstance(given, str) else given) for name, given in calls]


def _tools(row: Mapping[str, Any], calls: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the tools of a row, and those that are called without being offered."""
    tools = {tool["Function"]["Name"]: _ollama_schema(tool) for tool in row.get("tools") or []}
    return {**{name: {} for name, _ in calls}, **tools}


def _ollama_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    properties = (tool["Function"].get("Parameters") or {}).get("Properties") or {}
    return {"type": "object", "properties": {name: {"type": one.get("Type") or []} for name, one in properties.items()}}

"""Fields of a request: which are served, ignored or refused, and the error for a wrong one."""

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.server import adapter_routes, anthropic, model_routes, ollama, openai_chat, openai_completions, responses
from paceline.server.errors import HttpError
from paceline.server.field_table import TABLE, UNSET_VALUES, Refusal
from paceline.server.fields import IGNORED_HEADER, Fields, closest_name, read_body, report_ignored
from paceline.server.framing import data_event, line, named_event
from paceline.server.openai_chat import ChatFields
from paceline.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "a"}]
STRICT = ServerSettings(unknown_fields="refuse")


def read(body: dict[str, Any], settings: ServerSettings | None = None) -> tuple[ChatFields, list[str]]:
    fields = read_body(ChatFields, json.dumps({"messages": MESSAGES, **body}).encode(), settings or ServerSettings())
    return fields, list(fields.ignored)


def refusal(body: dict[str, Any], settings: ServerSettings | None = None) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read(body, settings)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("tempereture", "temperature"),
        ("temperatrue", "temperature"),
        ("temperatures", "temperature"),
        ("max_token", "max_tokens"),
        ("top-p", "top_p"),
        ("maxTokens", "max_tokens"),
        ("Model", "model"),
        ("mesages", "messages"),
    ],
)
@pytest.mark.parametrize("settings", [ServerSettings(), STRICT])
def test_field_name_one_edit_from_a_known_one_is_refused(name: str, meant: str, settings: ServerSettings) -> None:
    error = refusal({name: 1}, settings)
    assert (error.parameter, error.code) == (name, "unknown_parameter")
    assert error.message == f"{name} is no parameter of this request: did you mean {meant}?"


@pytest.mark.parametrize(
    "name",
    [
        "temp",
        "temperaturess",
        "tokens",
        "k",
        "nn",
        "tag",
        "x" * 10_000,
        "",
        "\u00e4\u00f6",
    ],
)
def test_field_name_unlike_known_ones_is_ignored(name: str) -> None:
    assert len(read({name: 1})[1]) == 1


@pytest.mark.parametrize("name", ["mode", "models", "context", "speed", "top", "seeds", "stops", "tool"])
def test_real_word_close_to_a_known_field_name_is_ignored(name: str) -> None:
    assert read({name: 5})[1] == [name]


@pytest.mark.parametrize(("n", "best_of", "is_refused"), [(2, 2, False), (None, 1, False), (2, 3, True), (2, 1, False), (None, 2, True)])
def test_best_of_equal_to_n_is_ignored(n: int | None, best_of: int, is_refused: bool) -> None:
    if is_refused:
        assert refusal({"n": n, "best_of": best_of}).parameter == "best_of"
    else:
        assert read({"n": n, "best_of": best_of})[1] == ["best_of"]


@pytest.mark.parametrize("message", [{"context": 1}, {"mode": 1}, {"names": 1}, {"citation": 1}, {"images": []}])
def test_message_field_of_another_api_is_no_misspelling(message: dict[str, Any]) -> None:
    for kind, more in ((ChatFields, {}), (anthropic.MessagesFields, {"max_tokens": 1}), (ollama.ChatFields, {"model": "mini"})):
        body = {"messages": [{**MESSAGES[0], **message}], **more}
        read_body(kind, json.dumps(body).encode(), ServerSettings())


@pytest.mark.parametrize(
    ("first", "second"),
    [("stop", "stopp"), ("seed", "sed"), ("abcde", "abced"), ("abcde", "xbcde"), ("abcde", "abcdx"), ("abcde", "abcdef")],
)
def test_closest_name_is_symmetric(first: str, second: str) -> None:
    short = min(len(first), len(second)) < 5
    assert (closest_name(first, [second]), closest_name(second, [first])) == ((None, None) if short else (second, first))


def test_ignored_fields_are_not_also_refused() -> None:
    for api, rows in TABLE.items():
        for place, rules in rows.items():
            assert not rules.ignored & set(rules.refused), (api, place)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"a": "\xff"}', "no UTF-8"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
        (b'{"a": }', "no JSON"),
    ],
)
def test_unreadable_request_body_is_refused_with_its_reason(body: bytes, text: str) -> None:
    for content in (body, body + b" " * 1_000_000):
        with pytest.raises(HttpError, match=text):
            read_body(ChatFields, content, ServerSettings())


def test_integer_field_may_be_written_as_a_float() -> None:
    fields, _ = read({"max_tokens": 8.0, "top_k": 40.0, "seed": -1.0, "temperature": 1})
    assert (fields.max_tokens, fields.top_k, fields.seed) == (8, 40, -1)
    assert isinstance(fields.max_tokens, int)
    for value in (8.5, True, "8", 1e400):
        assert refusal({"max_tokens": value}).parameter == "max_tokens"


PARTS: list[tuple[list[dict[str, Any]], str]] = [
    ([{"type": "thinking", "thinking": "Hm."}], "Hm."),
    ([{"type": "thinking", "thinking": [{"type": "text", "text": "H"}, {"type": "text", "text": "m."}]}], "Hm."),
    ([{"type": "reasoning", "reasoning": "Hm."}], "Hm."),
    ([{"type": "reasoning", "text": "Hm."}], "Hm."),
]


@pytest.mark.parametrize(("parts", "reasoning"), PARTS)
def test_reasoning_content_parts_of_an_assistant_message_are_read(parts: list[dict[str, Any]], reasoning: str) -> None:
    content = [*parts, {"type": "text", "text": "Yes."}]
    fields, _ = read({"messages": [*MESSAGES, {"role": "assistant", "content": content}, *MESSAGES]})
    (_, turn, _) = openai_chat.conversation(fields.messages, ServerSettings())
    assert (turn["content"], turn["reasoning_content"]) == ("Yes.", reasoning)
    fields, _ = read({"messages": [{"role": "user", "content": content}]})
    with pytest.raises(HttpError, match="belongs to the role assistant"):
        openai_chat.conversation(fields.messages, ServerSettings())


def test_unknown_nested_fields_are_named_by_their_path() -> None:
    message = {**MESSAGES[0], "mood": 1}
    tool = {"type": "function", "function": {"name": "f", "colour": 1}}
    _, ignored = read({"zeta": 1, "messages": [message, message], "tools": [tool], "alpha": 1})
    assert ignored == ["zeta", "alpha", "messages[].mood", "tools[].function.colour"]


def test_unknown_field_is_refused_with_unknown_fields_error() -> None:
    error = refusal({"messages": [*MESSAGES, {**MESSAGES[0], "mood": 1}]}, STRICT)
    assert (error.parameter, error.code) == ("messages[1].mood", "unknown_parameter")
    assert "--unknown-fields ignore" in error.message
    read({"metadata": {}, "cache_prompt": True, "messages": [{**MESSAGES[0], "cache_control": {}}]}, STRICT)


def test_unserved_field_with_a_harmless_value_is_accepted() -> None:
    for value in (None, False, "", [], {}, 0, ["text"]):
        read({"modalities": value})
    assert refusal({"modalities": ["audio"]}).message == "modalities is not served: this server reads and writes text only"
    read({"skip_special_tokens": True, "repeat_last_n": 64, "typical_p": 1.0})
    assert refusal({"skip_special_tokens": False}).parameter == "skip_special_tokens"
    assert refusal({"repeat_last_n": 64, "repeat_penalty": 1.1}).parameter == "repeat_last_n"


def test_ignored_fields_header_is_shortened_for_many_names() -> None:
    _, ignored = read({f"x{index}" * 30: 1 for index in range(5000)})
    value = report_ignored(ignored, set())[IGNORED_HEADER]
    assert len(value) < 1500
    assert value.endswith(", ...")
    assert report_ignored([], set()) == {}


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: b", "\ud800", "\u202e", "a,b", "\x00", " "])
def test_ignored_field_names_are_printable_in_header_and_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    _, ignored = read({name * 3: 1})
    (value,) = report_ignored(ignored, set()).values()
    assert value.isascii()
    assert value.isprintable()
    assert "," not in value
    assert json.loads(caplog.messages[0]) == {"event": "field_ignored", "field": value}


def test_ignored_field_names_are_logged_once_in_bounded_memory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paceline.server")
    logged = set[str]()
    for _ in range(3):
        report_ignored(["a", "b"], logged)
    assert len(caplog.messages) == 2
    report_ignored([f"x{index}" for index in range(10_000)], logged)
    assert len(logged) == len(caplog.messages) == 1000


@pytest.mark.parametrize("encode", [data_event, named_event, line])
def test_server_sent_event_data_contains_no_unicode_line_break(encode: Any) -> None:
    fields = {"type": "a", "text": "a\u2028b\u2029c\u0085d\x0b\x0c\x1c\x1d\x1ee\nf"}
    sent = encode(fields).decode()
    lines = sent.rstrip("\n").splitlines()
    assert len(lines) == (2 if encode is named_event else 1)
    assert json.loads(lines[-1].removeprefix("data: ")) == fields


def models() -> Iterator[type[Fields]]:
    for module in (openai_chat, openai_completions, model_routes, responses, anthropic, ollama, adapter_routes):
        for one in vars(module).values():
            if isinstance(one, type) and issubclass(one, Fields) and one.__module__ == module.__name__ and one.at[0]:
                yield one


@pytest.mark.parametrize("kind", list(models()), ids=lambda kind: f"{kind.__module__.rpartition('.')[2]}.{kind.__name__}")
def test_served_field_is_not_also_refused(kind: type[Fields]) -> None:
    assert not kind.served & set(kind.rules().refused)


def test_every_row_of_the_field_table_belongs_to_a_model() -> None:
    rows = {(api, place) for api, places in TABLE.items() for place in places}
    shared = {("chat", name) for name in ("response_format", "structured_outputs", "speculation")}
    assert rows - {kind.at for kind in models()} == shared


def test_every_refused_field_has_a_reason() -> None:
    for rows in TABLE.values():
        for rules in rows.values():
            for name, rule in rules.refused.items():
                assert isinstance(rule, Refusal)
                assert rule.reason, name
                assert not rule.applies(None, {}), name
                assert UNSET_VALUES[0] is None

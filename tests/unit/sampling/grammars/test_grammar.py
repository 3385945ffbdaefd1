"""A grammar is checked for form when it is made; what cannot be one is a clear request error."""

import json

import pytest

from paceline.errors import RequestError
from paceline.sampling.grammars.grammar import MAX_TEXT_CHARS, Grammar, GrammarKind

WRONG = {
    "an unknown kind": lambda: Grammar("xml", "<a/>"),  # type: ignore[arg-type]
    "no text": lambda: Grammar.regex(""),
    "a number": lambda: Grammar.lark(3),  # type: ignore[arg-type]
    "too much text": lambda: Grammar.regex("a" * (MAX_TEXT_CHARS + 1)),
    "half a character": lambda: Grammar.regex("\ud800"),
    "a list for a schema": lambda: Grammar.json_schema([]),  # type: ignore[arg-type]
    "JSON that is no schema": lambda: Grammar.json_schema("[]"),
    "no JSON": lambda: Grammar.json_schema('{"type": '),
    "deep JSON": lambda: Grammar.json_schema('{"items":' * 100_000),
    "a schema that is no JSON": lambda: Grammar.json_schema({"const": object()}),
    "a schema with NaN": lambda: Grammar.json_schema({"const": float("nan")}),
    "no choice": lambda: Grammar.choice([]),
    "an empty choice": lambda: Grammar.choice(["a", ""]),
    "one text for choices": lambda: Grammar.choice("ab"),
    "choices that are no list": lambda: Grammar(GrammarKind.CHOICE, '{"a": 1}'),
    "an empty marker": lambda: Grammar.json_object(reasoning_end=""),
    "options that are none": lambda: Grammar.json_schema({"x-guidance": 3}, any_whitespace=True),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_grammar_is_refused(name: str) -> None:
    with pytest.raises(RequestError) as refusal:
        WRONG[name]()
    assert refusal.value.parameter == "grammar"
    assert str(refusal.value).startswith("grammar: ")


@pytest.mark.parametrize("text", ['root ::= "a"', "# a list\nroot ::= item+\nitem ::= [a-z]", 'item  ::= "x"\r\nroot ::= item'])
def test_gbnf_grammar_text_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="it is in GBNF"):
        Grammar.lark(text)
    assert Grammar.lark(f"start: {json.dumps(text)}")


def test_grammar_kind_may_be_given_by_name() -> None:
    assert Grammar("regex", "a+") == Grammar.regex("a+")  # type: ignore[arg-type]
    assert {Grammar.regex("a+"): 1}[Grammar.regex("a+")] == 1


def test_json_schema_grammar_keeps_the_order_of_properties() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {}, "ü": {}}}
    assert list(json.loads(Grammar.json_schema(schema).text)["properties"]) == ["z", "a", "ü"]
    assert Grammar.json_schema(json.dumps(schema)).text == json.dumps(schema)


def test_any_whitespace_keeps_other_options_of_the_schema() -> None:
    grammar = Grammar.json_schema({"type": "object", "x-guidance": {"lenient": True}}, any_whitespace=True)
    options = json.loads(grammar.text)["x-guidance"]
    assert options["whitespace_flexible"] is True
    assert options["lenient"] is True

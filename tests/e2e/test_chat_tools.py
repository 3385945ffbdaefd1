"""`LLM.chat` with tools: what the model is shown, and what its text consists of."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.tool_model import write_tool_model
from paceline import LLM, AsyncEngine, Grammar, SamplingParams

CHAT = [{"role": "user", "content": "I need a taxi."}]
BOOK = {"name": "book", "parameters": {"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}}
WRITTEN = '<think>\nA ride.\n</think>\n\nI book it.<tool_call>{"name": "book", "arguments": {"kind": "taxi"}}</tool_call>'
FORM = SamplingParams(max_tokens=200, grammar=Grammar.choice([WRITTEN]))


@pytest.fixture(scope="module")
def directory(mini_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tool_model(mini_dir, tmp_path_factory.mktemp("tools") / "mini")


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), drafter="none", threads=1) as llm:
        yield llm


def test_chat_with_tools_returns_tool_calls_content_and_reasoning(llm: LLM) -> None:
    one = llm.chat(CHAT, FORM, tools=[BOOK])
    assert one.text == WRITTEN
    assert (one.content, one.reasoning) == ("I book it.", "A ride.")
    assert [(call.name, call.arguments) for call in one.tool_calls] == [("book", {"kind": "taxi"})]


def test_parsers_set_to_none_leave_the_text_unparsed(llm: LLM) -> None:
    one = llm.chat(CHAT, FORM, tools=[BOOK], tool_call_parser="none", reasoning_parser="none")
    assert (one.content, one.reasoning, one.tool_calls) == (WRITTEN, None, ())


def test_generate_does_not_parse_tool_calls_or_reasoning(llm: LLM) -> None:
    (one,) = llm.generate("Hm.", FORM)
    assert (one.content, one.reasoning, one.tool_calls) == (None, None, ())


def test_async_chat_with_tools_equals_the_synchronous_one(directory: Path) -> None:
    async def chat() -> tuple[str, ...]:
        engine = AsyncEngine.open(str(directory), drafter="none", threads=1)
        try:
            return tuple(call.name for one in await engine.chat(CHAT, FORM, tools=[BOOK]) for call in one.tool_calls)
        finally:
            await engine.close()

    assert asyncio.run(chat()) == ("book",)

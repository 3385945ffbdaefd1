"""Splits the text of a chat's output into content, reasoning and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.engine.chat_prompt import ChatPrompt
from paceline.outputs import RequestOutput
from paceline.parsing.parse_output import ParsedOutput
from paceline.parsing.registry import GENERIC, OutputFormat, OutputStream
from paceline.parsing.tools import Tool
from paceline.tokenizer.tokenizer import Tokenizer

_PROMPT_TAIL = 16  # tokens at the end of a prompt that may open reasoning


@dataclass(frozen=True, slots=True)
class ChatOutputParser:
    """Parses the outputs of one conversation.

    Attributes:
        formats: formats of the model's tool calls and reasoning.
        tools: functions in the prompt.
        in_reasoning: whether the prompt has opened reasoning.
    """

    formats: OutputFormat
    tools: tuple[Tool, ...] = ()
    in_reasoning: bool = False

    @classmethod
    def of_prompt(cls, tokenizer: Tokenizer, formats: OutputFormat, prompt: ChatPrompt, tools: Sequence[Tool]) -> "ChatOutputParser":
        """Return the parser for the outputs of a prompt."""
        if prompt.uses_generic_tools:
            formats = replace(formats, tool_call_parser=GENERIC)
        tail = tokenizer.decode(prompt.token_ids[-_PROMPT_TAIL:], skip_special_tokens=False)
        return cls(formats, tuple(tools), formats.has_opened_reasoning(tail))

    def shown_token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the special tokens whose texts the parser needs to see."""
        return special_ids(tokenizer, self.formats.tokens(self.tools))

    def stream(self, *, sample: int = 0, several: bool = True) -> OutputStream:
        """Return a parser of one sample whose text arrives in pieces."""
        return self.formats.stream(self.tools, sample=sample, several=several, in_reasoning=self.in_reasoning)

    def parsed(self, output: RequestOutput) -> RequestOutput:
        """Return a whole output with its content, reasoning and tool calls."""
        stream = self.stream(sample=output.sample_index)
        events = [*stream.push(output.text), *stream.finish()]
        found = ParsedOutput.of_events(events, stream.sink.broken_off)
        return replace(output, content=found.content, reasoning=found.reasoning, tool_calls=found.tool_calls)


def special_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[int]:
    """Return the ids of those texts that are tokens of their own."""
    ids = [tokenizer.added_token_id(text) for text in texts]
    return [token_id for token_id in ids if token_id is not None]

"""The table of formats in which models write calls of tools and thoughts, and which of them a model uses.

A new format is a file of its own and a line here.
"""

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import ConfigError
from paceline.server.dialogue.request import ChatRequest
from paceline.server.markup import gemma4, harmony, hermes, llama3, mistral, thoughts, xml
from paceline.server.markup.answer import AnswerReader, Markers, ReadMarkup
from paceline.server.markup.source import Source, Waiting
from paceline.server.markup.writer import Writer, call_id, short_call_id
from paceline.tokenizer.tokenizer import Tokenizer

AUTO, NONE, HARMONY = "auto", "none", "harmony"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    Attributes:
        markers: where they begin, and who reads them.
        signs: texts of which a chat template has all where its model writes so.
        tokens: special tokens that belong to the markup, where the model has them.
        new_id: makes ids of calls.
    """

    markers: Markers
    signs: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    new_id: Callable[[], str] = call_id


@dataclass(frozen=True, slots=True)
class ThinkFormat:
    """How thoughts are written; the first attributes as for calls.

    Attributes:
        open: what begins them; a prompt that ends with it has begun them.
        opened: reads on behind that.
    """

    markers: Markers
    signs: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    open: str = ""
    opened: ReadMarkup | None = None


HARMONY_TOKENS = (harmony.START, harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, *harmony.ENDS)
# in the order in which they are looked for: the signs of later ones may stand in templates of earlier ones
TOOL_FORMATS = {
    HARMONY: ToolFormat(Markers(), (harmony.CHANNEL, harmony.MESSAGE), HARMONY_TOKENS),
    "gemma4": ToolFormat(gemma4.MARKERS, (gemma4.OPEN,), (gemma4.OPEN, gemma4.CLOSE, gemma4.QUOTE)),
    "mistral": ToolFormat(mistral.MARKERS, (mistral.OPEN,), (mistral.OPEN, mistral.ARGS, mistral.CALL_ID), new_id=short_call_id),
    "xml": ToolFormat(xml.MARKERS, (xml.FUNCTION, xml.PARAMETER), (xml.OPEN, xml.CLOSE)),
    "hermes": ToolFormat(hermes.MARKERS, (hermes.OPEN,), (hermes.OPEN, hermes.CLOSE)),
    "llama3": ToolFormat(llama3.MARKERS, ("<|start_header_id|>", '"parameters"'), (llama3.PYTHON_TAG,)),
}
THINK_FORMATS = {
    HARMONY: ThinkFormat(Markers(), (harmony.CHANNEL, harmony.MESSAGE), HARMONY_TOKENS),
    "gemma4": ThinkFormat(thoughts.GEMMA4_MARKERS, (thoughts.GEMMA4,), (thoughts.GEMMA4, "<channel|>")),
    "mistral": ThinkFormat(
        thoughts.MISTRAL_MARKERS, (thoughts.MISTRAL,), (thoughts.MISTRAL, "[/THINK]"), thoughts.MISTRAL, thoughts.mistral
    ),
    "think": ThinkFormat(thoughts.THINK_MARKERS, ("</think>",), (thoughts.THINK, "</think>"), thoughts.THINK, thoughts.think),
}
TOOLS_CHOICES = (AUTO, NONE, *TOOL_FORMATS)
THINK_CHOICES = (AUTO, NONE, *THINK_FORMATS)


@dataclass(frozen=True, slots=True)
class Formats:
    """What one model writes.

    Attributes:
        tools, think: names in the tables; "none" = it writes no calls, or no thoughts, that we know how to read.
    """

    tools: str
    think: str

    @classmethod
    def of(cls, tokenizer: Tokenizer, tools: str = AUTO, think: str = AUTO) -> "Formats":
        """Those that were named, or that the chat template shows.

        Raises:
            ConfigError: there is no such format, or two do not go together.
        """
        for option, name, choices in (("tools_format", tools, TOOLS_CHOICES), ("think_format", think, THINK_CHOICES)):
            if name not in choices:
                raise ConfigError(f"{option} is {name!r}: use one of {', '.join(choices)}")
        template = "".join(tokenizer.template_source(has_tools=has_tools) for has_tools in (False, True))
        found_tools, found_think = _found(TOOL_FORMATS, template), _found(THINK_FORMATS, template)
        chosen = cls(found_tools if tools == AUTO else tools, found_think if think == AUTO else think)
        if HARMONY in (chosen.tools, chosen.think) and not {chosen.tools, chosen.think} <= {HARMONY, NONE}:
            raise ConfigError(
                f"tools_format is {chosen.tools!r} and think_format {chosen.think!r}: {HARMONY} goes with itself or {NONE} alone"
            )
        return chosen

    def tokens(self, request: ChatRequest) -> tuple[str, ...]:
        """Special tokens that the reader of an answer has to see."""
        tools = TOOL_FORMATS[self.tools].tokens if self._reads_calls(request) else ()
        return tools + (THINK_FORMATS[self.think].tokens if self.think != NONE else ())

    def has_opened_thoughts(self, prompt: str) -> bool:
        """Whether a prompt, of which the end is enough, has begun thoughts."""
        return self.think != NONE and bool(opening := THINK_FORMATS[self.think].open) and prompt.rstrip().endswith(opening)

    def writer(self, request: ChatRequest, sample: int) -> Writer:
        """Takes down a sample."""
        new_id = call_id if self.tools == NONE else TOOL_FORMATS[self.tools].new_id
        return Writer(sample, request.offered_tools, None if request.parallel_tool_calls else 1, new_id)

    def reading(self, request: ChatRequest, writer: Writer, *, has_opened: bool) -> Waiting:
        """Reads one sample.

        Args:
            has_opened: whether the prompt has begun thoughts.
        """
        source, has_calls, has_thoughts = Source(), self._reads_calls(request), self.think != NONE
        if (has_calls and self.tools == HARMONY) or self.think == HARMONY:
            return Waiting(source, harmony.HarmonyReader(has_thoughts=has_thoughts, has_calls=has_calls).read(source, writer))
        think = THINK_FORMATS[self.think] if has_thoughts else None
        reader = AnswerReader(
            think.markers if think else Markers(),
            TOOL_FORMATS[self.tools].markers if has_calls else Markers(),
            think.opened if think and has_opened else None,
        )
        return Waiting(source, reader.read(source, writer))

    def _reads_calls(self, request: ChatRequest) -> bool:
        return self.tools != NONE and bool(request.offered_tools)


def _found(formats: "dict[str, ToolFormat] | dict[str, ThinkFormat]", template: str) -> str:
    return next((name for name, one in formats.items() if all(sign in template for sign in one.signs)), NONE)

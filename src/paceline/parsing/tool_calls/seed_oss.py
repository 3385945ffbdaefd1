"""<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>: Seed-OSS.

Reasoning is between <seed:think> and </seed:think>. Remarks on the thinking budget are part of it.
"""

from dataclasses import replace

from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.markers import Markers
from paceline.parsing.reasoning import ReasoningReader
from paceline.parsing.tool_calls import qwen3_coder

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
THINK = ("<seed:think>", "</seed:think>")
BUDGET = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
TAGS = replace(qwen3_coder.TAGS, open=OPEN, close=CLOSE, border="")
read_reasoning = ReasoningReader(THINK[1])
THINK_MARKERS = Markers(first={THINK[0]: read_reasoning})
MARKERS = Markers(anywhere={OPEN: TAGS.read_calls})
FORMAT = ToolCallFormat(MARKERS, (OPEN,), (OPEN, CLOSE), TAGS.calls_grammar, OPEN)
REASONING_FORMAT = ReasoningFormat(THINK_MARKERS, THINK[:1], (*THINK, *BUDGET), *THINK, read_reasoning)

"""<seed:tool_call><function=f><parameter=a>x</parameter></function></seed:tool_call>: Seed-OSS.

Reasoning is between <seed:think> and </seed:think>. Remarks on the thinking budget are part of it.
"""

from dataclasses import replace

from paceline.parsing.formats import ReasoningFormat, ToolCallFormat
from paceline.parsing.reasoning import ReasoningReader
from paceline.parsing.tool_calls import qwen3_coder

OPEN, CLOSE = "<seed:tool_call>", "</seed:tool_call>"
THINK = ("<seed:think>", "</seed:think>")
BUDGET = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
TAGS = replace(qwen3_coder.TAGS, open=OPEN, close=CLOSE, border="")
read_reasoning = ReasoningReader(THINK[1])
FORMAT = ToolCallFormat({OPEN: TAGS.read_calls}, (OPEN,), (OPEN, CLOSE), TAGS.calls_grammar, OPEN)
REASONING_FORMAT = ReasoningFormat({}, THINK[:1], (*THINK, *BUDGET), *THINK, read_reasoning, first={THINK[0]: read_reasoning})

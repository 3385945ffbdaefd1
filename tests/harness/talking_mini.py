"""The mini with a chat template that knows tools and thoughts, and an engine that writes what a test says."""

import json
import shutil
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest

from paceline.outputs import RequestOutput, StreamChunk, Timing, Usage
from paceline.server.generation import Generation, Job

MINI = Path(__file__).resolve().parents[2] / "src/paceline/assets/mini/target"
TEMPLATE = """
{%- if tools %}<|im_start|>system
Tools: {{ tools | tojson }}. Call them so: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"""


def write_talking_mini(directory: Path) -> Path:
    """A checkpoint of the mini that is told of tools and of whether to think."""
    shutil.copytree(MINI, directory, ignore=shutil.ignore_patterns("draft"))
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return directory


def write_down(patch: pytest.MonkeyPatch, text: str, *, piece_len: int = 3, finish_reason: str = "stop") -> None:
    """Let every engine write `text`, in pieces of so many characters."""
    pieces = [text[start : start + piece_len] for start in range(0, len(text), piece_len)]
    usage = Usage(5, len(pieces))
    output = RequestOutput(text, list(range(len(pieces))), [1] * 5, finish_reason, usage, Timing(0.1, 0.2), seed=1, numerics="exact")

    async def collect(_: Generation, job: Job) -> list[RequestOutput]:
        job.prompt_ids(_.engine.opened.maker)
        return [output]

    async def stream(_: Generation, job: Job) -> AsyncGenerator[tuple[int, StreamChunk], None]:
        job.prompt_ids(_.engine.opened.maker)
        for index, piece in enumerate(pieces):
            is_last = index == len(pieces) - 1
            yield 0, StreamChunk(piece, [index], [], output if is_last else None, usage=Usage(5, index + 1))

    patch.setattr(Generation, "collect", collect)
    patch.setattr(Generation, "stream", stream)


def kinds(events: Sequence[dict[str, object]]) -> list[object]:
    """The types of events, deltas in a row told once."""
    found = [event["type"] for event in events]
    return [kind for index, kind in enumerate(found) if index == 0 or kind != found[index - 1] or not str(kind).endswith("delta")]

"""The mini with our own chat template that supports tools and reasoning."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.sampling.grammars.grammar import Grammar
from paceline.server import chat

TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- 'Functions:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}
{{- 'Call one: <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.name + ': ' + message.content + '</tool_response><|im_end|>\\n' }}
    {%- elif message.role != 'system' or not tools %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning_content %}{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
            {{- '}</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"""


def write_tool_model(mini: Path, directory: Path, template: str = TEMPLATE) -> Path:
    """A checkpoint directory whose files are the mini's but for the chat template."""
    directory.mkdir(exist_ok=True)
    for path in mini.iterdir():
        if path.is_file() and path.name != "tokenizer_config.json":
            (directory / path.name).symlink_to(path)
    config = json.loads((mini / "tokenizer_config.json").read_text(encoding="utf-8"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}), encoding="utf-8")
    return directory


@contextmanager
def answering(grammar: Grammar) -> Iterator[None]:
    """The model writes any text that the grammar allows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "answer_grammar", lambda *_, **__: grammar)
        yield

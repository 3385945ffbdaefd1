"""One call in each format that is JSON between marks, as the models write it."""

REASONING_PARSERS = {
    "phi4_mini_json": "none",
    "functools": "none",
    "nemotron_json": "qwen3",
    "deepseek_v3": "qwen3",
    "deepseek_v31": "qwen3",
    "deepseek_v32": "qwen3",
    "deepseek_v4": "qwen3",
    "cohere_command3": "cohere_command3",
    "command_r": "none",
    "internlm": "none",
    "hy_v3": "qwen3",
    "jamba": "none",
    "hunyuan_a13b": "hunyuan_a13b",
    "xlam": "none",
    "functionary_v31": "none",
    "functionary_v32": "functionary_v32",
    "gigachat3": "none",
    "gigachat3_message": "none",
    "hy_v3_opensource": "hy_v3_opensource",
    "minimax_m1": "none",
    "granite-20b-fc": "granite",
}
"""The reasoning format that models of a tool-call format use."""
REASONING = {
    "nemotron_json": "<think>\nHm.\n</think>\n\n",
    "deepseek_v3": "<think>\nHm.\n</think>\n\n",
    "deepseek_v31": "<think>Hm.</think>",
    "deepseek_v32": "<think>Hm.</think>",
    "deepseek_v4": "<think>Hm.</think>",
    "cohere_command3": "<|START_THINKING|>Hm.<|END_THINKING|>",
    "hy_v3": "<think>Hm.</think>",
    "hy_v3_opensource": "<think:opensource>Hm.</think:opensource>",
    "hunyuan_a13b": "<think>\nHm.\n</think>\n",
    "granite-20b-fc": "Here is my thought process: Hm. Here is my response: ",
}


def written_calls(arguments: str) -> dict[str, str]:
    """Return one call of `book` a format. `arguments` is the text of an object with the keys `kind` and `seats`."""
    dsml = (
        '<｜DSML｜invoke name="book">\n<｜DSML｜parameter name="kind" string="true">taxi</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="seats" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    )
    call = f'{{"name": "book", "arguments": {arguments}}}'
    hunyuan = (
        "<tool_calls>\n<tool_call>book<tool_sep>\n<arg_key>kind</arg_key>\n<arg_value>taxi</arg_value>\n"
        "<arg_key>seats</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n</tool_calls>"
    )
    return {
        "phi4_mini_json": f"<|tool_call|>[{call}]<|/tool_call|>",
        "functools": f"functools[{call}]",
        "nemotron_json": f"<TOOLCALL>[{call}]</TOOLCALL>",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>book\n"
        f"```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>book<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v32": f"<｜DSML｜function_calls>\n{dsml}</｜DSML｜function_calls>",
        "deepseek_v4": f"<｜DSML｜tool_calls>\n{dsml}</｜DSML｜tool_calls>",
        "cohere_command3": "<|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "book", "parameters": {arguments}}}\n]<|END_ACTION|>',
        "command_r": f'Action:\n```json\n[\n    {{\n        "tool_name": "book",\n        "parameters": {arguments}\n    }}\n]\n```',
        "internlm": f'<|action_start|><|plugin|>\n{{"name": "book", "parameters": {arguments}}}<|action_end|>',
        "hy_v3": hunyuan,
        "hy_v3_opensource": hunyuan.replace(">", ":opensource>"),
        "gigachat3": f"<|function_call|>{call}",
        "gigachat3_message": f"<|message_sep|>\n\nfunction call<|role_sep|>\n{call}",
        "minimax_m1": f"<tool_calls>\n{call}\n</tool_calls>",
        "jamba": f"<tool_calls>[\n    {call}\n]</tool_calls>",
        "hunyuan_a13b": f"<tool_calls>[{call}]</tool_calls>",
        "xlam": f"[{call}]",
        "functionary_v31": f"<function=book>{arguments}</function>",
        "functionary_v32": f">>>book\n{arguments}",
        "granite-20b-fc": f"<function_call> {call}",
    }

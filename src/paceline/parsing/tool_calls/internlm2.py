"""<|action_start|><|plugin|>{"name": …, "parameters": {…}}<|action_end|>: InternLM 2 and 2.5."""

from paceline.parsing.json_call import JsonCallList

START, PLUGIN, END = "<|action_start|>", "<|plugin|>", "<|action_end|>"
TOKENS = (START, PLUGIN, END)
CALLS = JsonCallList(
    open_marks=(START + PLUGIN,), close_marks=(END,), head='\n{"name": NAME, "parameters": ', tail="}", after=END, between=""
)
FORMAT = CALLS.format_of((START, PLUGIN), TOKENS)

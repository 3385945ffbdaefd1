"""How a model is told whether to think, and how much, in the words of its chat template."""

from typing import Any

from paceline.errors import RequestError
from paceline.tokenizer.tokenizer import Tokenizer


def thinking_options(
    tokenizer: Tokenizer, *, thinks: bool | None = None, effort: str | None = None, always: bool = False
) -> dict[str, Any]:
    """What the chat template is told.

    Args:
        thinks: whether to think; None = as the model does by itself.
        effort: how much, "none" included; None = as the model does by itself.
        always: whether the model writes thoughts, told or not.

    Raises:
        RequestError: it cannot be told, and does not do so by itself; `parameter` is "thinking" or "reasoning_effort".
    """
    if effort is not None and tokenizer.template_takes("reasoning_effort"):
        return {"reasoning_effort": effort}
    wanted = thinks if effort is None else effort != "none"
    if wanted is None or (effort is None and wanted == always and not tokenizer.template_takes("enable_thinking")):
        return {}
    if tokenizer.template_takes("enable_thinking"):
        return {"enable_thinking": wanted}
    name = "thinking" if effort is None else "reasoning_effort"
    raise RequestError(
        f"{name} is not served: this model's chat template cannot be told how to think; say it in a message",
        parameter=name,
        code="unsupported_parameter",
    )

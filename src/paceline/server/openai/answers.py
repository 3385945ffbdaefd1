"""What the answers of OpenAI's dialects have in common."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

from paceline.engine.inputs import RequestOptions
from paceline.outputs import RequestOutput
from paceline.server.service import Service

DONE = b"data: [DONE]\n\n"


def head(service: Service, options: RequestOptions, kind: str, prefix: str) -> dict[str, Any]:
    """The fields that an answer, or every chunk of one, begins with.

    Args:
        options: of the request.
    """
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": service.name_of(options),
        "system_fingerprint": service.fingerprint,
    }


def usage_of(outputs: Sequence[RequestOutput], *, counts_output: bool = True) -> dict[str, Any]:
    """Token counts of a request; a prompt counts once, however many samples it has."""
    first = [output.usage for output in outputs if output.sample_index == 0]
    num_prompt = sum(one.prompt_tokens for one in first)
    num_output = sum(output.usage.completion_tokens for output in outputs) if counts_output else 0
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in first)},
    }

"""Engines with drafting heads, as tests of every kind of head open them, and the requests they answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline import LLM, RequestOutput, SamplingParams
from paceline.drafters.head_files import HeadFiles
from paceline.drafters.mtp import MtpModule, load_mtp, open_gguf_module
from paceline.models.checkpoint import open_weights, read_model_config
from paceline.speculation.drafter import Drafter

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
PROMPTS = [[5, 6, 7], [9], list(range(1, 80)), [31, 2]]


def open_llm(target: Path, drafter: str | list[str] | Drafter, **options: Any) -> LLM:
    """A tiny target; unless the options differ, three tokens are drafted a step."""
    shape = {"num_speculative_tokens": 3, "threads": 2, "max_model_len": 256, "kv_cache_gb": 0.05, "backend": "native", **options}
    return LLM(str(target), drafter=drafter, device="cpu", **shape)


def load_module(path: Path) -> MtpModule:
    """The MTP module inside a model, a directory or a GGUF file."""
    files, config = HeadFiles.open(path) if path.is_dir() else open_gguf_module(path), read_model_config(path)
    assert files is not None
    return load_mtp(files, config, open_weights(path, config))


def ids_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """The tokens of each output."""
    return [output.token_ids for output in outputs]


def check_drafting(llm: LLM, plain: LLM, params: SamplingParams, prompts: Sequence[list[int]] = PROMPTS) -> None:
    """Check that an engine generates what one without drafts does, in a batch and on a cached prefix, and that it drafts."""
    expected = ids_of(plain.generate(prompts, params))
    outputs = llm.generate(prompts, params)
    assert ids_of(outputs) == expected
    assert ids_of(llm.generate(prompts[2:3], params)) == expected[2:3]
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 100
    assert llm.stats().drafter_failures == 0


def follow(successor: Sequence[int], token: int, count: int = 40) -> list[int]:
    """The tokens after this one, for a target that generates the successor of each."""
    tokens = [token]
    for _ in range(count):
        tokens.append(int(successor[tokens[-1]]))
    return tokens[1:]

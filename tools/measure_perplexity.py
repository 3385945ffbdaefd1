"""Perplexity of models on held-out text, as stored, quantised, and with several types of keys and values.

    python tools/measure_perplexity.py --model mini --text heldout.jsonl --quantization none int8 int4 --tokens 20000

Texts (JSON lines with a field "text") are cut into windows. Within a window each token but the first is predicted from those before it.
All settings see the same tokens; the table shows how much worse each is than the first.
"""

import argparse
import json
import math
import time
from itertools import product
from pathlib import Path

from paceline import LLM, SamplingParams
from paceline.config import KV_CACHE_DTYPES
from paceline.tokenizer.tokenizer import Tokenizer

SCORED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


def read_windows(path: Path, tokenizer: Tokenizer, *, window: int, limit: int) -> list[list[int]]:
    """Token ids in windows of at most `window`, until there are `limit` tokens."""
    windows: list[list[int]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        ids = tokenizer.encode(json.loads(line)["text"])
        for start in range(0, len(ids), window):
            part = ids[start : min(start + window, start + limit)]
            if len(part) > 1:
                windows.append(part)
                limit -= len(part)
            if limit <= 0:
                return windows
    return windows


def mean_nats(llm: LLM, windows: list[list[int]]) -> tuple[float, int]:
    """Mean negative log-likelihood of a token, and the number of tokens it is over."""
    outputs = llm.generate(windows, SCORED)
    nats = [-one.logprob for output in outputs for one in output.prompt_logprobs or () if one is not None]
    return math.fsum(nats) / len(nats), len(nats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["mini"], help="'mini', directories or GGUF files")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a field 'text'")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--regroup", action="store_true", help="quantise the matrices of GGUF files again, as --gguf-weights regroup does")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], choices=KV_CACHE_DTYPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    first = None
    print("| setting | perplexity | change | tokens | seconds |\n|---|---|---|---|---|")
    for model, quantization, kv_cache_dtype in product(options.model, options.quantization, options.kv_cache_dtype):
        with LLM(model, drafter="none", quantization=quantization, kv_cache_dtype=kv_cache_dtype, dtype=options.dtype,
                 backend=options.backend, gguf_weights="regroup" if options.regroup else "exact", threads=options.threads,
                 max_model_len=options.window + 1, enable_prefix_caching=False) as llm:  # fmt: skip
            start = time.perf_counter()
            nats, count = mean_nats(llm, read_windows(options.text, llm.tokenizer, window=options.window, limit=options.tokens))
        setting = f"{Path(model).name}, {quantization}, keys and values {kv_cache_dtype}"
        first = nats if first is None else first
        change = 100 * math.expm1(nats - first)
        print(f"| {setting} | {math.exp(nats):.4f} | {change:+.2f} % | {count} | {time.perf_counter() - start:.1f} |", flush=True)


if __name__ == "__main__":
    main()

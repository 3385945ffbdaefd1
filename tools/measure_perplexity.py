"""Perplexity of a model on held-out text, as stored, quantised, and with several types of keys and values.

    python tools/measure_perplexity.py --model mini --text heldout.jsonl --quantization none int8 int4 --tokens 20000

Every text is cut into windows; within a window each token but the first is predicted from those before it. All settings see the same
tokens, and the table says by how much each is worse than the first.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.config import KV_CACHE_DTYPES, QuantOptions, cache_directory, quant_options
from paceline.hub import resolve
from paceline.kv_cache.cache import BLOCK_SIZE, CachedSequence, KVCache
from paceline.machine import usable_processors
from paceline.models.config import WeightType
from paceline.models.kv_cache_dtype import KVCacheDtype
from paceline.runtimes.base import Network, Numerics, assemble
from paceline.runtimes.load import RuntimeOptions, load_runtime
from paceline.tokenizer.tokenizer import Tokenizer
from reporting import describe_machine


@dataclass(frozen=True, slots=True)
class Measured:
    """Perplexity of one setting.

    Attributes:
        nats: mean negative log-likelihood of a token.
        load_s, run_s: seconds to load and to run.
    """

    name: str
    nats: float
    num_tokens: int
    load_s: float
    run_s: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats)


def read_windows(path: Path, tokenizer: Tokenizer, *, window: int, limit: int) -> list[list[int]]:
    """Token ids of the texts of a JSON-lines file (field "text") in windows of at most `window`, until `limit` tokens are there."""
    windows: list[list[int]] = []
    count = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            ids = tokenizer.encode(json.loads(line)["text"])
            for start in range(0, len(ids), window):
                part = ids[start : min(start + window, start + limit - count)]
                if len(part) > 1:
                    windows.append(part)
                    count += len(part)
                if count >= limit:
                    return windows
    return windows


def mean_nats(runtime: Network, windows: list[list[int]], *, rows: int) -> tuple[float, int]:
    """Mean negative log-likelihood over all windows, and the tokens it is over; passes of `rows` rows."""
    longest = max(len(window) for window in windows)
    cache = runtime.new_cache(3 + -(-longest // BLOCK_SIZE))
    total, count = 0.0, 0
    for window in windows:
        sequence = cache.new_sequence()
        for logits, targets in _passes(runtime, cache, sequence, window, rows):
            total += float(_nats(logits, targets).sum())
            count += len(targets)
        cache.release(sequence)
    return total / count, count


def _passes(
    runtime: Network, cache: KVCache, sequence: CachedSequence, window: list[int], rows: int
) -> Iterator[tuple[np.ndarray, list[int]]]:
    for start in range(0, len(window) - 1, rows):
        given = window[start : min(start + rows, len(window) - 1)]
        plan = cache.reserve(sequence, range(-1, len(given) - 1))
        output = runtime.forward(*assemble([plan], [given], [range(len(given))]))
        cache.keep_path(sequence, len(given) - 1)
        yield output.logits, window[start + 1 : start + 1 + len(given)]


def _nats(logits: np.ndarray, targets: list[int]) -> np.ndarray:
    wide = logits.astype(np.float64)
    highest = wide.max(axis=1)
    return highest + np.log(np.exp(wide - highest[:, None]).sum(axis=1)) - wide[np.arange(len(targets)), targets]


def measure(
    model: str, quantization: QuantOptions | None, kv_cache_dtype: str, name: str, windows: list[list[int]], arguments: argparse.Namespace
) -> Measured:
    """Load the model with one setting and run it over all windows."""
    options = RuntimeOptions(
        numerics=Numerics.FAST,
        dtype=None if arguments.dtype == "auto" else WeightType(arguments.dtype),
        kv_cache_dtype=None if kv_cache_dtype == "auto" else KVCacheDtype(kv_cache_dtype),
        num_threads=arguments.threads,
        max_model_len=arguments.window,
        device="cpu",
        backend=arguments.backend,
        quantization=quantization,
        quant_directory=cache_directory(),
        regroup=arguments.regroup,
    )
    start = time.perf_counter()
    runtime = load_runtime(Path(model), options).runtime
    loaded = time.perf_counter()
    nats, count = mean_nats(runtime, windows, rows=arguments.rows)
    return Measured(name, nats, count, loaded - start, time.perf_counter() - loaded)


def parse_settings(arguments: argparse.Namespace) -> list[tuple[str, QuantOptions | None]]:
    """The settings to compare: the named ones, and in groups of other sizes where asked for."""
    named = [(name, quant_options("quantization", name)) for name in arguments.quantization]
    found: list[tuple[str, QuantOptions | None]] = []
    for name, options in named:
        if options is None:
            found.append((name, None))
            continue
        for group in arguments.group:
            for symmetric in (True, False) if arguments.affine else (True,):
                label = f"{name}, groups of {group}{'' if symmetric else ', affine'}"
                found.append((label, QuantOptions(bits=options.bits, group=group, symmetric=symmetric)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["mini"], help="'mini', directories or GGUF files")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines with a field 'text'")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--group", nargs="+", type=int, default=[128])
    parser.add_argument("--affine", action="store_true", help="measure affine groups as well")
    parser.add_argument("--regroup", action="store_true", help="quantise the matrices of GGUF files again, as --gguf-weights regroup does")
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"], choices=KV_CACHE_DTYPES)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rows", type=int, default=128, help="rows of a pass")
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()

    results: list[Measured] = []
    for model in arguments.model:
        path = Path(model) if Path(model).is_file() else resolve(model)
        windows = read_windows(arguments.text, Tokenizer.open(path), window=arguments.window, limit=arguments.tokens)
        for name, options in parse_settings(arguments):
            for kv_cache_dtype in arguments.kv_cache_dtype:
                label = name if len(arguments.model) == 1 else f"{path.name}, {name}"
                label = label if len(arguments.kv_cache_dtype) == 1 else f"{label}, keys and values in {kv_cache_dtype}"
                results.append(measure(str(path), options, kv_cache_dtype, label, windows, arguments))
                _print_row(results[-1], results[0])
    if arguments.json:
        rows = [{"setting": one.name, "perplexity": one.perplexity, "nats": one.nats, "tokens": one.num_tokens} for one in results]
        arguments.json.write_text(json.dumps({"machine": describe_machine(), "results": rows}, indent=1), encoding="utf-8")


def _print_row(result: Measured, first: Measured) -> None:
    change = (result.perplexity / first.perplexity - 1) * 100
    seconds = f"{result.load_s:.1f} s | {result.run_s:.1f} s"
    print(f"| {result.name} | {result.perplexity:.4f} | {change:+.2f} % | {result.num_tokens} | {seconds} |", flush=True)


if __name__ == "__main__":
    main()

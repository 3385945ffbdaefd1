"""The engines that bench_passes.py times, each the whole work of one process; runs where only numpy and that engine are installed."""

import argparse
import ctypes
import importlib
import json
import math
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_machine import package_versions
from bench_models import stored_tensors, write_gguf

REPOSITORY = Path(__file__).resolve().parents[1]
LOGITS_COMPARED = 256
CHUNK = 512  # rows of a prompt in one pass


KEPT_ROWS = 8192  # room for all rounds where rows are kept
VERIFIED = 16  # more rows than these are those of a prompt


def _wanted(rows: int) -> range:
    """Whose logits are made: all rows' where guesses are checked, the last one's of a prompt."""
    return range(rows) if rows <= VERIFIED else range(rows - 1, rows)


class Engine(ABC):
    """One library with one checkpoint. `load`, `prepare` once, then `run` any number of times."""

    @abstractmethod
    def load(self) -> dict[str, Any]:
        """Open the checkpoint; returns what is worth printing."""

    @abstractmethod
    def prepare(self, rows: int, batch: int) -> None:
        """Cache the prompt, in passes of 512 rows, for `batch` sequences and leave room for `rows` more rows each."""

    @abstractmethod
    def run(self, rows: int, batch: int) -> tuple[float, list[float]]:
        """Seconds of one pass, and logits of its last row; the cache is as before afterwards."""


class Paceline(Engine):
    """This library, through the runtime its engine drives; quantised while loading, or from the GGUF file llama.cpp runs."""

    def __init__(
        self,
        options: argparse.Namespace,
        *,
        numerics: str = "exact",
        backend: str = "auto",
        quantization: str = "none",
        gguf: str | None = None,
    ) -> None:
        sys.path.insert(0, str(REPOSITORY / "src"))
        from paceline.config import quant_options
        from paceline.models.config import WeightType
        from paceline.runtimes.base import Numerics
        from paceline.runtimes.load import RuntimeOptions, load_runtime

        importlib.import_module("paceline.runtimes.native.network")  # else its memory would count as the checkpoint's
        if options.level is not None:
            importlib.import_module("paceline.runtimes.native.library").__dict__["_LEVELS"] = {options.level: set()}
        self._checkpoint = options.checkpoint
        self._file = options.checkpoint if gguf is None else options.gguf if gguf == "given" else quantised_file(options, gguf)
        self._cached, self._keeps = options.cached, options.keep
        self._facts = options.work / "facts"
        dtype = None if options.dtype == "auto" else WeightType(options.dtype)
        self._options = RuntimeOptions(
            numerics=Numerics(numerics),
            dtype=dtype,
            num_threads=options.threads,
            max_model_len=options.cached + (KEPT_ROWS if options.keep else 512),
            facts_directory=self._facts,
            backend=backend,
            quantization=quant_options("quantization", quantization),
            quant_directory=options.work / "quantised",
        )
        self._open = load_runtime

    def load(self) -> dict[str, Any]:
        loaded = self._open(self._file, self._options)
        self._runtime = loaded.runtime
        capabilities = loaded.runtime.capabilities
        return {
            "numerics": capabilities.numerics.value,
            "type": capabilities.weight_type.value,
            "weights_bytes": self._weights_bytes(capabilities.weight_type.value),
            "notices": loaded.notices,
        }

    def _weights_bytes(self, computed: str) -> int:
        """Bytes the runtime keeps: as stored or quantised in the native one, widened in the other."""
        if hasattr(self._runtime, "weights"):
            return int(self._runtime.weights.nbytes)
        return (4 if computed == "f32" else 2) * sum(math.prod(item["shape"]) for item in stored_tensors(self._checkpoint).values())

    def cache(self, blocks: int) -> dict[str, Any]:
        """Allocate and touch a cache of `blocks` blocks; returns its bytes."""
        cache = self._runtime.new_cache(blocks)
        for memory in cache.layer_caches:
            memory.storage.fill(0)
        return {"cache_bytes": cache.num_bytes}

    def prepare(self, rows: int, batch: int) -> None:
        from paceline.kv_cache.recurrent_state import CheckpointConfig
        from paceline.runtimes.base import assemble

        self._assemble = assemble
        block_size = 32
        num_blocks = batch * -(-(self._cached + (KEPT_ROWS if self._keeps else rows)) // block_size)
        self._cache = self._runtime.new_cache(num_blocks, checkpoints=CheckpointConfig(max_checkpoints=0))
        self._sequences = [self._cache.new_sequence() for _ in range(batch)]
        prompt = _prompt(self._runtime.config.vocab_size, self._cached)
        for sequence in self._sequences:
            for begin in range(0, self._cached, CHUNK):
                part = prompt[begin : begin + CHUNK]
                plan = self._cache.reserve(sequence, range(-1, len(part) - 1), len(part))
                if sequence is self._sequences[0]:
                    self._runtime.forward(*assemble([plan], [part], [[]]))
                self._cache.keep_path(sequence, len(part) - 1)
            for memory in self._cache.layer_caches:
                for source, target in zip(self._sequences[0].block_table, sequence.block_table, strict=True):
                    memory.copy_block(source, target)

    def run(self, rows: int, batch: int) -> tuple[float, list[float]]:
        sequences = self._sequences[:batch]
        ids = _new_rows(rows, self._runtime.config.vocab_size)
        start = time.perf_counter()
        plans = [self._cache.reserve(sequence, range(-1, rows - 1), rows if rows > VERIFIED else 1) for sequence in sequences]
        output = self._runtime.forward(*self._assemble(plans, [ids] * batch, [_wanted(rows)] * batch))
        seconds = time.perf_counter() - start
        for sequence in sequences:
            if self._keeps:
                self._cache.keep_path(sequence, rows - 1)
            else:
                self._cache.cancel(sequence)
        return seconds, output.logits[-1, :LOGITS_COMPARED].tolist()


class Transformers(Engine):
    """AutoModelForCausalLM without compilation."""

    def __init__(self, options: argparse.Namespace, dtype: str) -> None:
        self._torch = importlib.import_module("torch")
        self._transformers = importlib.import_module("transformers")
        self._torch.set_num_threads(options.threads)
        self._options, self._dtype = options, dtype

    def load(self) -> dict[str, Any]:
        attention = self._options.attention
        opened = self._transformers.AutoModelForCausalLM.from_pretrained
        self._model = opened(str(self._options.checkpoint), dtype=self._dtype, attn_implementation=attention).eval()
        return {"type": str(self._model.dtype), "attention": attention}

    def prepare(self, rows: int, batch: int) -> None:
        self._caches: dict[int, Any] = {}

    def run(self, rows: int, batch: int) -> tuple[float, list[float]]:
        torch = self._torch
        vocab_size = self._model.config.vocab_size
        with torch.inference_mode():
            if batch not in self._caches:
                self._caches[batch] = self._transformers.DynamicCache(config=self._model.config)
                self._model(torch.tensor([_prompt(vocab_size, self._options.cached)]), past_key_values=self._caches[batch])
                self._caches[batch].batch_repeat_interleave(batch)
            cache = self._caches[batch]
            ids = _new_rows(rows, vocab_size)
            start = time.perf_counter()
            logits = self._model(torch.tensor([ids] * batch), past_key_values=cache).logits
            seconds = time.perf_counter() - start
            cache.crop(-rows)
            return seconds, logits[-1, -1, :LOGITS_COMPARED].float().tolist()


class LlamaCpp(Engine):
    """llama_decode of llama-cpp-python's low-level interface, on a GGUF file with the checkpoint's bf16 matrices."""

    def __init__(self, options: argparse.Namespace, gguf: str = "bf16") -> None:
        self._api = importlib.import_module("llama_cpp")
        self._options = options
        self._gguf = gguf
        self._cached, self._keeps = options.cached, options.keep
        self._file = options.gguf if gguf == "given" else options.work / f"{options.checkpoint.name}.gguf"

    def load(self) -> dict[str, Any]:
        api = self._api
        if not self._file.is_file() and self._gguf != "given":
            write_gguf(self._options.checkpoint, self._file)
        if self._gguf not in ("bf16", "given"):
            self._file = self._quantised()
        model_parameters = api.llama_model_default_params()
        model_parameters.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(str(self._file).encode(), model_parameters)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {self._file}")
        self._vocab_size = int(api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model)))
        return {"type": self._gguf, "system": api.llama_print_system_info().decode().strip()}

    def prepare(self, rows: int, batch: int) -> None:
        api = self._api
        parameters = api.llama_context_default_params()
        parameters.n_ctx = batch * 256 * -(-(self._cached + (KEPT_ROWS if self._keeps else rows)) // 256)
        parameters.n_seq_max = batch
        parameters.n_outputs_max_per_seq = parameters.n_outputs_max = max(rows, batch, CHUNK)
        parameters.n_threads = parameters.n_threads_batch = self._options.threads
        self._context = api.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._memory = api.llama_get_memory(self._context)
        self._batch = api.llama_batch_init(max(rows, batch, CHUNK), 0, 1)
        self._position = self._cached
        prompt = _prompt(self._vocab_size, self._cached)
        for begin in range(0, self._cached, CHUNK):
            self._decode(prompt[begin : begin + CHUNK], 1, begin)
        for sequence in range(1, batch):
            api.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def run(self, rows: int, batch: int) -> tuple[float, list[float]]:
        api = self._api
        ids = _new_rows(rows, self._vocab_size)
        start = time.perf_counter()
        self._decode(ids, batch, self._position)
        logits = api.llama_get_logits_ith(self._context, rows * batch - 1)
        seconds = time.perf_counter() - start
        if self._keeps:
            self._position += rows
        for sequence in range(batch):
            if not self._keeps:
                api.llama_memory_seq_rm(self._memory, sequence, self._cached, -1)
        return seconds, list(logits[:LOGITS_COMPARED])

    def _quantised(self) -> Path:
        """The file with every matrix in one block type, made by llama.cpp itself."""
        api, file = self._api, quantised_file(self._options, self._gguf)
        if not file.is_file():
            parameters = api.llama_model_quantize_default_params()
            parameters.ftype = {"q8_0": api.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": api.LLAMA_FTYPE_MOSTLY_Q4_0}[self._gguf]
            parameters.pure = True
            part = file.with_suffix(".part")
            if api.llama_model_quantize(str(self._file).encode(), str(part).encode(), ctypes.byref(parameters)):
                raise RuntimeError(f"llama.cpp cannot quantise {self._file}")
            part.rename(file)
        return file

    def _decode(self, ids: Sequence[int], batch: int, position: int) -> None:
        row, wanted = 0, _wanted(len(ids))
        for sequence in range(batch):
            for offset, token in enumerate(ids):
                self._batch.token[row] = token
                self._batch.pos[row] = position + offset
                self._batch.n_seq_id[row] = 1
                self._batch.seq_id[row][0] = sequence
                self._batch.logits[row] = offset in wanted
                row += 1
        self._batch.n_tokens = row
        code = self._api.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")


ENGINES: dict[str, Callable[[argparse.Namespace], Engine]] = {
    "exact": lambda options: Paceline(options),
    "fast": lambda options: Paceline(options, numerics="fast"),
    "native": lambda options: Paceline(options, backend="native"),
    "int8": lambda options: Paceline(options, quantization="int8"),
    "int4": lambda options: Paceline(options, quantization="int4"),
    "gguf-q8_0": lambda options: Paceline(options, gguf="q8_0"),
    "gguf": lambda options: Paceline(options, gguf="given"),
    "gguf-q4_0": lambda options: Paceline(options, gguf="q4_0"),
    "transformers": lambda options: Transformers(options, "auto"),
    "transformers-f32": lambda options: Transformers(options, "float32"),
    "llama": LlamaCpp,
    "llama-q8_0": lambda options: LlamaCpp(options, "q8_0"),
    "llama-q4_0": lambda options: LlamaCpp(options, "q4_0"),
    "llama-gguf": lambda options: LlamaCpp(options, "given"),
}


def quantised_file(options: argparse.Namespace, kind: str) -> Path:
    """Where llama.cpp's quantised copy of the checkpoint lies, once an engine llama-KIND has made it."""
    directory: Path = options.work
    return directory / f"{options.checkpoint.name}-{kind}.gguf"


def serve(options: argparse.Namespace) -> None:
    """Obey orders until stdin ends; whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = ENGINES[options.worker](options)
    for line in sys.stdin:
        order = json.loads(line)
        start = time.perf_counter()
        answer: dict[str, Any] = {}
        if order["do"] == "imported":
            answer = {"versions": package_versions()}
        elif order["do"] == "load":
            answer = engine.load()
            answer["load_s"] = round(time.perf_counter() - start, 2)
        elif order["do"] == "cache" and isinstance(engine, Paceline):
            answer = engine.cache(order["blocks"])
        elif order["do"] == "prepare":
            engine.prepare(order["rows"], order["batch"])
            answer["prompt_s"] = round(time.perf_counter() - start, 3)
        elif order["do"] == "pass":
            time.sleep(0.02)  # the engine before this one may still have threads that spin
            for _ in range(order["warm"]):
                engine.run(order["rows"], order["batch"])
            answer["seconds"], answer["logits"] = engine.run(order["rows"], order["batch"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _prompt(vocab_size: int, count: int) -> list[int]:
    """Tokens of the cached rows."""
    return [(37 * index + 11) % vocab_size for index in range(count)]


def _new_rows(count: int, vocab_size: int) -> list[int]:
    """Tokens of one sequence's new rows."""
    return [(101 * index + 7) % vocab_size for index in range(count)]

"""Runs llama.cpp, through the C API that llama-cpp-python binds. Started by the environment's own Python.

The loop is that of llama.cpp's `examples/speculative-simple`: one pass over the last token and the draft, the target's token drawn at
each row, draft tokens are accepted while they are equal. Asked for, as llama.cpp has it by default: up to 16 tokens from a draft model,
which stops where the probability of its best token among ten falls below 0.75; prompt lookup by the package's own
`LlamaPromptLookupDecoding` (n-grams of 2, 10 tokens). Directories are written as GGUF once (export_gguf.py): bf16 as BF16, int8 as Q8_0,
int4 as Q4_0.
"""

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

loop = importlib.import_module("worker_loop")

KINDS = {
    "bf16": "BF16",
    "int8": "Q8_0",
    "int4": "Q4_0",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_k_m": "Q4_K_M",
    "q4_k": "Q4_K_M",
    "q5_k": "Q5_K_M",
    "q6_k": "Q6_K",
    "f32": "F32",
}
DRAFT_TOKENS = 16
MIN_PATH_PROBABILITY = 0.75
LOOKUP_NGRAM, LOOKUP_TOKENS = 2, 10
_CANDIDATES = 10
_ROWS = 512  # rows of a prefill pass

Propose = Callable[[list[int]], list[int]]


class Context:
    """A model with its cache, which holds the rows of `token_ids`."""

    def __init__(self, api: Any, file: Path, *, threads: int, length: int, rows: int) -> None:
        self.api, self.numpy = api, importlib.import_module("numpy")
        model_options = api.llama_model_default_params()
        model_options.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(str(file).encode(), model_options)
        if not self.model:
            raise loop.PeerError(f"llama.cpp cannot load {file}")
        options = api.llama_context_default_params()
        options.n_ctx = length
        options.n_batch = options.n_ubatch = min(_ROWS, length)
        options.n_threads = options.n_threads_batch = threads
        for name in ("n_outputs_max", "n_outputs_max_per_seq"):
            if hasattr(options, name):
                setattr(options, name, rows)
        self.context = api.llama_init_from_model(self.model, options)
        if not self.context:
            raise loop.PeerError(f"llama.cpp has no memory for {length} tokens of {file}")
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.token_ids: list[int] = []
        self._batch = api.llama_batch_init(options.n_batch, 0, 1)
        self._step = options.n_batch

    def read(self, token_ids: Sequence[int], *, outputs: int) -> None:
        """Run a forward pass over more tokens and compute logits for the last `outputs` of them."""
        for start in range(0, len(token_ids), self._step):
            part = token_ids[start : start + self._step]
            for row, token in enumerate(part):
                batch = self._batch
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, len(self.token_ids) + row, 1
                batch.seq_id[row][0] = 0
                batch.logits[row] = start + row >= len(token_ids) - outputs
            self._batch.n_tokens = len(part)
            if self.api.llama_decode(self.context, self._batch):
                raise loop.PeerError("llama.cpp refuses a pass")
            self.token_ids += part

    def logits(self, row: int) -> Any:
        return self.numpy.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, row), (self.vocab_size,))

    def forget(self, kept: int) -> None:
        """Drop the rows after the first `kept`."""
        if kept < len(self.token_ids):
            memory = self.api.llama_get_memory(self.context)
            if kept == 0:
                self.api.llama_memory_clear(memory, True)
            elif not self.api.llama_memory_seq_rm(memory, 0, kept, -1):
                raise loop.PeerError("llama.cpp cannot drop draft rows from this model's memory")
            del self.token_ids[kept:]


class DraftModel:
    """Drafts with a small model, a token at a time."""

    def __init__(self, context: Context, num_speculative_tokens: int) -> None:
        self._context, self._most = context, num_speculative_tokens

    def __call__(self, token_ids: list[int]) -> list[int]:
        held = self._context.token_ids
        same = next((index for index, pair in enumerate(zip(held, token_ids, strict=False)) if pair[0] != pair[1]), len(held))
        self._context.forget(min(same, len(token_ids) - 1))
        self._context.read(token_ids[len(self._context.token_ids) :], outputs=1)
        drafts: list[int] = []
        numpy = self._context.numpy
        while True:
            logits = self._context.logits(-1)
            best = numpy.partition(logits, -_CANDIDATES)[-_CANDIDATES:]
            if 1 / numpy.exp(best - best.max()).sum() < MIN_PATH_PROBABILITY:
                return drafts
            drafts.append(int(logits.argmax()))
            if len(drafts) == self._most:
                return drafts
            self._context.read(drafts[-1:], outputs=1)


def open_model(command: Any) -> Any:
    api = importlib.import_module("llama_cpp")
    api.llama_backend_init()
    kind = KINDS.get(command["precision"])
    target = gguf_of(Path(command["model"]), kind)
    most = command["num_speculative_tokens"] or DRAFT_TOKENS
    threads, length = command["threads"], command["context"] + most + 1
    context = Context(api, target, threads=threads, length=length, rows=most + 1)
    propose: Propose | None = None
    note = "plain passes"
    if command["mode"] == "draft_model":
        draft = Context(api, gguf_of(Path(command["draft"]), kind), threads=threads, length=length, rows=1)
        if draft.vocab_size != context.vocab_size:
            raise loop.PeerError(f"the draft model has {draft.vocab_size} tokens and the target {context.vocab_size}")
        propose, note = DraftModel(draft, most), f"up to {most} tokens while their probability is {MIN_PATH_PROBABILITY} or more"
    elif command["mode"] == "ngram":
        count = command["num_speculative_tokens"] or LOOKUP_TOKENS
        lookup = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding(LOOKUP_NGRAM, count)
        propose = lambda ids: lookup(context.numpy.array(ids, dtype="int32")).tolist()  # noqa: E731
        note = f"LlamaPromptLookupDecoding(max_ngram_size={LOOKUP_NGRAM}, num_pred_tokens={count})"
    version = f"llama-cpp-python {api.__version__}"
    return loop.Opened(
        "llama.cpp", version, f"{target.name}; {note}", lambda request, arrived: _generate(context, propose, request, arrived)
    )


def gguf_of(path: Path, kind: str | None) -> Path:
    """Return the model as a GGUF file: itself, or exported from a directory."""
    if path.is_file():
        return path
    if kind is None:
        raise loop.PeerError(f"no GGUF type is meant by this precision: use one of {', '.join(KINDS)}")
    export = importlib.import_module("export_gguf")
    found: Path = loop.converted(path, f"{kind}.gguf", lambda target: export.export_gguf(path, target, kind))
    return found


def _sampler(api: Any, temperature: float, seed: int) -> Any:
    chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
    if temperature > 0:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_temp(temperature))
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_dist(seed & 0xFFFFFFFF))
    else:
        api.llama_sampler_chain_add(chain, api.llama_sampler_init_greedy())
    return chain


def _generate(target: Context, propose: Propose | None, request: Any, arrived: Any) -> Any:
    """Generate exactly `max_tokens` tokens; end tokens do not end the output."""
    api, wanted = target.api, request["max_tokens"]
    prompt = list(request["prompt_ids"])
    target.forget(0)
    sampler = _sampler(api, request["temperature"], request["seed"])
    output: list[int] = []
    drafted = accepted = 0
    drafts: list[int] = []
    target.read(prompt, outputs=1)
    while True:
        new = []
        for row in range(len(drafts) + 1):
            new.append(api.llama_sampler_sample(sampler, target.context, row if drafts else -1))
            if row == len(drafts) or new[-1] != drafts[row]:
                break
        accepted += len(new) - 1
        output += new
        arrived(len(new))
        if len(output) >= wanted:
            break
        target.forget(len(prompt) + len(output) - 1)
        drafts = propose(prompt + output)[: wanted - len(output) - 1] if propose is not None and len(output) + 1 < wanted else []
        drafted += len(drafts)
        target.read([output[-1], *drafts], outputs=len(drafts) + 1)
    api.llama_sampler_free(sampler)
    return loop.Generated(output, *((drafted, accepted) if propose else (None, None)))


if __name__ == "__main__":
    loop.serve(open_model)

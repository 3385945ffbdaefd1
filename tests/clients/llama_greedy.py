"""Greedy tokens of a GGUF file by llama.cpp, with margins; runs where llama-cpp-python is installed. Input and output are JSON.

A llama.cpp that was built with a BLAS multiplies `MIN_ROWS` rows or more in float32, with the values of the file as they are. Therefore
all prompts advance together, one token a pass.
"""

import json
import sys
from typing import Any

import llama_cpp as api
import numpy as np

MIN_ROWS = 32  # ggml-blas.cpp leaves smaller products to the kernels that round


class Batch:
    """One context for all prompts, a sequence each."""

    def __init__(self, file: str, prompts: list[list[int]], max_tokens: int, threads: int) -> None:
        model_options, options = api.llama_model_default_params(), api.llama_context_default_params()
        model_options.use_extra_bufts = False  # where Q4_0 is laid out for kernels that round
        longest = max(map(len, prompts))
        options.n_ctx = len(prompts) * (longest + max_tokens)
        options.n_batch = options.n_ubatch = max(longest, len(prompts))
        options.n_seq_max, options.kv_unified = len(prompts), True
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = 0  # float32, as ours
        model = api.llama_model_load_from_file(file.encode(), model_options)
        self._context = api.llama_init_from_model(model, options)
        self._batch = api.llama_batch_init(options.n_batch, 0, 1)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def logits(self, rows: list[tuple[int, int, int]]) -> list[Any]:
        """Run one pass; a row is a token, its position and its sequence."""
        assert len(rows) >= MIN_ROWS, f"a pass of {len(rows)} rows would be rounded: at least {MIN_ROWS} prompts are needed"
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index], batch.logits[index] = token, position, 1, True
            batch.seq_id[index][0] = sequence
        assert api.llama_decode(self._context, batch) == 0, "llama.cpp refuses a pass"
        found = (api.llama_get_logits_ith(self._context, index) for index in range(len(rows)))
        return [np.ctypeslib.as_array(one, (self._vocab_size,)).copy() for one in found]


def greedy(file: str, prompts: list[list[int]], max_tokens: int, threads: int) -> list[list[dict[str, float]]]:
    """For each prompt the tokens, each with its margin over the second best."""
    batch = Batch(file, prompts, max_tokens, threads)
    last = [batch.logits([(token, at, owner) for at, token in enumerate(prompt)])[-1] for owner, prompt in enumerate(prompts)]
    answers: list[list[dict[str, float]]] = [[] for _ in prompts]
    for step in range(max_tokens):
        for answer, logits in zip(answers, last, strict=True):
            best, second = np.argsort(-logits, kind="stable")[:2]
            answer.append({"token": int(best), "margin": float(logits[best] - logits[second])})
        last = batch.logits([(int(answers[owner][-1]["token"]), len(prompt) + step, owner) for owner, prompt in enumerate(prompts)])
    return answers


if __name__ == "__main__":
    json.dump(greedy(**json.load(sys.stdin)), sys.stdout)

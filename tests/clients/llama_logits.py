"""Runs where llama-cpp-python is installed: llama.cpp's logits of every token of a text, for a GGUF file without a tokenizer.

python llama_logits.py MODEL.gguf IDS.json OUT.npy [as-when-decoding]

All tokens are one pass with keys and values in float32; with the last argument each is a pass of its own with llama.cpp's defaults, as when
it generates.
"""

import json
import sys
from typing import Any

import llama_cpp as api
import numpy as np

_SILENT = api.llama_log_callback(lambda level, text, data: None)


def run_pass(context: Any, token_ids: list[int], start: int, vocab_size: int) -> list[Any]:
    """Return the logits of tokens at positions from `start` on."""
    batch = api.llama_batch_init(len(token_ids), 0, 1)
    for row, token in enumerate(token_ids):
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, start + row, 1, True
        batch.seq_id[row][0] = 0
    batch.n_tokens = len(token_ids)
    if api.llama_decode(context, batch):
        sys.exit("llama.cpp cannot run it")
    return [np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), (vocab_size,)).copy() for row in range(len(token_ids))]


def main() -> None:
    path, ids_path, out = sys.argv[1:4]
    is_decoding = len(sys.argv) > 4
    with open(ids_path, encoding="utf-8") as file:
        token_ids = json.load(file)
    api.llama_log_set(_SILENT, None)
    model_parameters = api.llama_model_default_params()
    model_parameters.n_gpu_layers = 0
    model = api.llama_model_load_from_file(path.encode(), model_parameters)
    if not model:
        sys.exit("llama.cpp cannot load it")
    parameters = api.llama_context_default_params()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = 512
    if not is_decoding:
        parameters.type_k = parameters.type_v = api.GGML_TYPE_F32
        parameters.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    parameters.n_threads = parameters.n_threads_batch = 1
    parameters.swa_full = True
    parameters.n_outputs_max_per_seq = parameters.n_outputs_max = len(token_ids)
    context = api.llama_init_from_model(model, parameters)
    size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    length = 1 if is_decoding else len(token_ids)
    rows = [row for start in range(0, len(token_ids), length) for row in run_pass(context, token_ids[start : start + length], start, size)]
    np.save(out, np.stack(rows))


if __name__ == "__main__":
    main()

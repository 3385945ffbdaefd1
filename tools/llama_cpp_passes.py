"""Time llama.cpp's forward passes of GGUF files as `bench.py passes` times ours: 1 and 8 tokens after 64 tokens in the KV cache.

    .venv-clients/llama-cpp/bin/python tools/llama_cpp_passes.py DIR/model.gguf

The environment is made by `make .venv-clients/llama-cpp/.installed`. Logits of all rows are computed, as for verifying drafts.
"""

import statistics
import sys
import time
from collections.abc import Sequence

import llama_cpp

CACHED_ROWS, ROW_COUNTS, REPEATS, WARM_UP = 64, (1, 8), 9, 2
SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)


def decode(context: object, start: int, token_ids: Sequence[int]) -> float:
    """Return the milliseconds of one pass."""
    batch = llama_cpp.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for index, token_id in enumerate(token_ids):
        batch.token[index], batch.pos[index], batch.n_seq_id[index] = token_id, start + index, 1
        batch.seq_id[index][0], batch.logits[index] = 0, 1
    begin = time.perf_counter()
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_synchronize(context)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    llama_cpp.llama_batch_free(batch)
    if status:
        raise RuntimeError(f"llama_decode returned {status}")
    return milliseconds


def main(paths: Sequence[str]) -> None:
    llama_cpp.llama_log_set(SILENT, None)
    llama_cpp.llama_backend_init()
    for path in paths:
        model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_threads, options.n_threads_batch = 1024, 2, 2
        context = llama_cpp.llama_init_from_model(model, options)
        memory = llama_cpp.llama_get_memory(context)
        decode(context, 0, range(10, 10 + CACHED_ROWS))
        medians = []
        for count in ROW_COUNTS:
            times = []
            for _ in range(REPEATS):
                llama_cpp.llama_memory_seq_rm(memory, 0, CACHED_ROWS, -1)
                times.append(decode(context, CACHED_ROWS, range(100, 100 + count)))
            medians.append(statistics.median(times[WARM_UP:]))
        print(path, *(f"M={count}: {one:.1f} ms" for count, one in zip(ROW_COUNTS, medians, strict=True)), flush=True)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


if __name__ == "__main__":
    main(sys.argv[1:])

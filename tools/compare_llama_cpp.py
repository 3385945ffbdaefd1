"""Greedy tokens of GGUF files, ours compared with llama.cpp's: how often they are the same, and how near a tie every difference is.

    python tools/compare_llama_cpp.py MODEL --work DIR --llama-python PYTHON_WITH_LLAMA_CPP --prompts PROMPTS.jsonl

MODEL is a bf16 Llama directory with a byte-level BPE tokenizer; it is written as BF16, Q8_0 and Q4_0 GGUF first. As shipped both round
activations before such matrices, to 8 bits or to bfloat16. A sum in another order moves a value across a rounding border now and then,
and what follows differs by as much as rounding does, so the two may part where the best two tokens are nearly level: both margins are
shown, as logits, at the first token that differs. The yardstick is llama.cpp compared with itself, prompts in one pass and token by token.

With --float32 neither rounds: both read the same files, we with dtype="f32", and llama.cpp, built with a BLAS, multiplies whole batches in
float32. What then still differs is how the file was read. `make test-clients` builds such a llama.cpp. Prompts: a file with one JSON object
or string a line.
"""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS = ("BF16", "Q8_0", "Q4_0")
LEAST_ROWS = 32  # ggml-blas.cpp leaves smaller products to the kernels that round


def llama_cpp_greedy(file: Path, prompts: list[list[int]], max_tokens: int, threads: int, piece: int) -> list[list[dict[str, float]]]:
    """For each prompt the tokens with their margin over the second best; runs where llama-cpp-python is installed.

    Args:
        piece: tokens of a prompt that are run at once.
    """
    api = importlib.import_module("llama_cpp")
    numpy = importlib.import_module("numpy")
    as_float32 = {"type_k": 0, "type_v": 0}  # the cache, as ours
    model = api.Llama(str(file), n_ctx=1024, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False, **as_float32)
    answers = []
    for prompt in prompts:
        model.reset()
        for start in range(0, len(prompt), piece):
            model.eval(prompt[start : start + piece])
        answer = []
        for _ in range(max_tokens):
            logits = numpy.asarray(model.scores[model.n_tokens - 1])
            best, second = numpy.argsort(-logits, kind="stable")[:2]
            answer.append({"token": int(best), "second": int(second), "margin": float(logits[best] - logits[second])})
            model.eval([int(best)])
        answers.append(answer)
    return answers


def llama_cpp_in_float32(file: Path, prompts: list[list[int]], max_tokens: int, threads: int) -> list[list[dict[str, float]]]:
    """Like `llama_cpp_greedy`, all prompts at once: a llama.cpp that was built with a BLAS multiplies LEAST_ROWS rows or more in float32,
    with the values of the file as they are."""
    api = importlib.import_module("llama_cpp")
    numpy = importlib.import_module("numpy")
    model_options, options = api.llama_model_default_params(), api.llama_context_default_params()
    model_options.use_extra_bufts = False  # where Q4_0 is laid out for kernels that round
    longest = max(map(len, prompts))
    options.n_ctx = len(prompts) * (longest + max_tokens)
    options.n_batch = options.n_ubatch = max(longest, len(prompts))
    options.n_seq_max, options.kv_unified = len(prompts), True
    options.n_threads = options.n_threads_batch = threads
    options.type_k = options.type_v = 0  # float32, as ours
    model = api.llama_model_load_from_file(str(file).encode(), model_options)
    context = api.llama_init_from_model(model, options)
    batch, vocab_size = api.llama_batch_init(options.n_batch, 0, 1), api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))

    def logits_of(rows: list[tuple[int, int, int]]) -> list[Any]:
        """Of every row: its token, its place, and whose it is."""
        if len(rows) < LEAST_ROWS:
            raise SystemExit(f"a pass of {len(rows)} rows would be rounded: at least {LEAST_ROWS} prompts of as many tokens are needed")
        batch.n_tokens = len(rows)
        for index, (token, place, owner) in enumerate(rows):
            batch.token[index], batch.pos[index], batch.n_seq_id[index], batch.logits[index] = token, place, 1, True
            batch.seq_id[index][0] = owner
        if api.llama_decode(context, batch):
            raise SystemExit("llama.cpp refuses a pass")
        return [numpy.ctypeslib.as_array(api.llama_get_logits_ith(context, index), (vocab_size,)).copy() for index in range(len(rows))]

    last = [logits_of([(token, place, owner) for place, token in enumerate(prompt)])[-1] for owner, prompt in enumerate(prompts)]
    answers: list[list[dict[str, float]]] = [[] for _ in prompts]
    for step in range(max_tokens):
        for answer, logits in zip(answers, last, strict=True):
            best, second = numpy.argsort(-logits, kind="stable")[:2]
            answer.append({"token": int(best), "second": int(second), "margin": float(logits[best] - logits[second])})
        last = logits_of([(int(answers[owner][-1]["token"]), len(prompt) + step, owner) for owner, prompt in enumerate(prompts)])
    return answers


def our_greedy(file: Path, prompts: list[list[int]], options: argparse.Namespace) -> tuple[list[list[int]], Any]:
    """Our tokens, and the model to ask for margins."""
    from paceline import LLM, SamplingParams

    llm = LLM(str(file), threads=options.threads, max_model_len=1024, dtype="f32" if options.float32 else "auto")
    params = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, ignore_eos=True)
    return [list(result.token_ids) for result in llm.generate(prompts, params)], llm


def our_margin(llm: Any, context: list[int]) -> tuple[float, int]:
    """Logit of our best token less that of the second after `context`, and the second."""
    import numpy as np

    from paceline.runtimes.base import assemble

    cache = llm.engine.cache
    sequence = cache.new_sequence()
    plan = cache.reserve(sequence, range(-1, len(context) - 1))
    logits = llm.engine.runtime.forward(*assemble([plan], [context], [[len(context) - 1]])).logits[0]
    best, second = np.argsort(-logits, kind="stable")[:2]
    margin = float(logits[best] - logits[second])
    cache.cancel(sequence)
    cache.release(sequence)
    return margin, int(second)


def ask_llama_cpp(file: Path, prompts: list[list[int]], options: argparse.Namespace, piece: int | None) -> list[list[dict[str, Any]]]:
    """`llama_cpp_greedy` in its own Python, or `llama_cpp_in_float32` without a `piece`."""
    work = json.dumps({"file": str(file), "prompts": prompts, "max_tokens": options.max_tokens, "threads": options.threads, "piece": piece})
    command = [options.llama_python, str(Path(__file__).resolve()), "--worker"]
    done = subprocess.run(command, input=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-1500:])
    answers: list[list[dict[str, Any]]] = json.loads(done.stdout.splitlines()[-1])
    return answers


def compare(file: Path, prompts: list[list[int]], options: argparse.Namespace) -> dict[str, Any]:
    """Run ours and llama.cpp on a file, and print what differs."""
    ours, llm = our_greedy(file, prompts, options)
    theirs = ask_llama_cpp(file, prompts, options, None if options.float32 else 512)
    same, differences = 0, []
    for number, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        at = next((i for i, (one, two) in enumerate(zip(mine, other, strict=True)) if one != two["token"]), None)
        if at is None:
            same += 1
            continue
        margin, second = our_margin(llm, prompt + mine[:at])
        swapped = second == other[at]["token"] and other[at]["second"] == mine[at]
        differences.append({"prompt": number, "at": at, "our_margin": margin, "their_margin": other[at]["margin"], "swapped": swapped})
    print(f"{file.name}: {same} of {len(prompts)} texts of {options.max_tokens} tokens are the same")
    with_itself = None
    if not options.float32:
        piecewise = ask_llama_cpp(file, prompts, options, 1)
        pairs = zip(theirs, piecewise, strict=True)
        with_itself = sum([one["token"] for one in whole] == [one["token"] for one in pieces] for whole, pieces in pairs)
        print(f"  llama.cpp compared with itself, prompts in one pass and token by token: {with_itself} of {len(prompts)}")
    for item in differences:
        tie = "the same two tokens, swapped" if item["swapped"] else "other tokens"
        print(
            f"  prompt {item['prompt']}, token {item['at']}: our margin {item['our_margin']:.4f}, theirs {item['their_margin']:.4f}, {tie}"
        )
    return {"file": file.name, "same": same, "with_itself": with_itself, "prompts": len(prompts), "differences": differences}


def read_prompts(file: Path, directory: Path, count: int) -> list[list[int]]:
    """Token ids of the first `count` prompts, cut to 200."""
    from paceline.tokenizer.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(directory)
    texts = []
    for line in file.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        texts.append(item if isinstance(item, str) else item.get("prompt") or item.get("text") or str(item.get("turns", [""])[0]))
    prompts = [tokenizer.encode(text)[:200] for text in texts]
    return [prompt for prompt in prompts if prompt][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--work", type=Path)
    parser.add_argument("--llama-python")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true", help="do not round activations; llama.cpp must be built with a BLAS")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work = json.load(sys.stdin)
        if work["piece"] is None:
            del work["piece"]
        greedy = llama_cpp_greedy if "piece" in work else llama_cpp_in_float32
        print(json.dumps(greedy(Path(work.pop("file")), **work)))
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from harness.llama_gguf import write_gguf

    options.work.mkdir(parents=True, exist_ok=True)
    prompts = read_prompts(options.prompts, options.model, options.count)
    results = []
    for kind in options.kinds:
        file = options.work / f"{options.model.name}-{kind.lower()}.gguf"
        if not file.is_file():
            write_gguf(options.model, file, kind)
        results.append(compare(file, prompts, options))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

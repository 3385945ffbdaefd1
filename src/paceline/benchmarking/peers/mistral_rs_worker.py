"""Runs mistral.rs on the CPU, through its Python wheel. Started by the environment's own Python.

Its Python API takes text: a prompt is given as the text of its ids, in a chat template that adds nothing, and only where that text is
tokenised to the same ids. It answers with text; ids are those of the best tokens it reports, which greedily are the ones it chose. Its
stream leaves out tokens without text, so it is asked for whole answers: the time of the first token is its own count, to a millisecond,
and the others are spread evenly after it. Asked for: no prefix cache; int8 and int4 by its in-situ quantisation to Q8_0 and Q4_0. The
wheel has no draft models and no prompt lookup, and its MTP needs PagedAttention, which the CPU has not.
"""

import importlib
import importlib.metadata
import json
import tempfile
import time
from pathlib import Path
from typing import Any

loop = importlib.import_module("worker_loop")

QUANTISED = {"bf16": None, "f32": None, "int8": "Q8_0", "int4": "Q4_0"}
TEMPLATE = "{{ messages[0]['content'] }}"


def open_model(command: Any) -> Any:
    """Open the model with mistral.rs' `Runner`."""
    if command["precision"] not in QUANTISED:
        raise loop.PeerError(f"{command['precision']} is no precision that mistral.rs is measured in: {', '.join(QUANTISED)}")
    library = importlib.import_module("mistralrs")
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        options: dict[str, Any] = {"max_seqs": 1, "prefix_cache_n": 0, "jinja_explicit": str(template), "token_source": "none"}
        if QUANTISED[command["precision"]]:
            options["in_situ_quant"] = QUANTISED[command["precision"]]
        dtype = library.ModelDType.F32 if command["precision"] == "f32" else library.ModelDType.BF16
        model = str(readable(Path(command["model"])))
        runner = library.Runner(which=library.Which.Plain(model_id=model, dtype=dtype), **options)
    kind = QUANTISED[command["precision"]] or command["precision"]
    note = f"{kind}; times of single tokens are its total, spread evenly"
    version = importlib.metadata.version("mistralrs")
    return loop.Opened("mistral.rs", version, note, lambda request, _: _generate(library, runner, request))


def readable(path: Path) -> Path:
    """Return the directory, or a copy whose config has `rope_theta` where mistral.rs reads it."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    theta = (config.get("rope_parameters") or {}).get("rope_theta")
    if theta is None or "rope_theta" in config:
        return path

    def link(target: Path) -> None:
        target.mkdir()
        for file in path.iterdir():
            if file.is_file() and file.name != "config.json":
                (target / file.name).symlink_to(file.resolve())
        (target / "config.json").write_text(json.dumps(config | {"rope_theta": theta}), encoding="utf-8")

    found: Path = loop.converted(path, "mistral-rs", link)
    return found


def _generate(library: Any, runner: Any, request: Any) -> Any:
    prompt, temperature = list(request["prompt_ids"]), request["temperature"]
    text = runner.detokenize_text(prompt, False)
    if list(runner.tokenize_text(text, False, None)) != prompt:
        raise loop.PeerError("mistral.rs takes text, and this prompt's text is tokenised to other ids")
    command = library.ChatCompletionRequest(
        messages=[{"role": "user", "content": text}],
        model="default",
        max_tokens=request["max_tokens"],
        temperature=temperature,
        top_k=1 if temperature == 0 else None,
        logprobs=True,
        top_logprobs=1,
        ignore_eos=True,
    )
    start = time.perf_counter()
    answer = runner.send_chat_completion_request(command)
    seconds = time.perf_counter() - start
    token_ids = [item.top_logprobs[0].token for item in answer.choices[0].logprobs.content]
    first = min(seconds, answer.usage.total_prompt_time_sec)
    share = (seconds - first) / max(1, len(token_ids) - 1)
    return loop.Generated(token_ids, times_s=[first + share * index for index in range(len(token_ids))])


if __name__ == "__main__":
    loop.serve(open_model)

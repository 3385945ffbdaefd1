"""Runs mistral.rs on the CPU, through its Python wheel. Started by the environment's own Python.

Its Python API takes text: a prompt is given as the text of its ids, in a chat template that adds nothing, and only where that text is
tokenised to the same ids. Ids of the answer are those of the best tokens it reports, which greedily are the ones it chose. Asked for: no
prefix cache, in-situ quantisation to Q8_0 or Q4_0 for int8 and int4, MTP as its own settings have it. The wheel has no draft models and
no prompt lookup.
"""

import importlib
import importlib.metadata
import json
import tempfile
from pathlib import Path
from typing import Any

loop = importlib.import_module("worker_loop")

QUANTISED = {"bf16": None, "f32": None, "int8": "Q8_0", "int4": "Q4_0"}
TEMPLATE = "{{ messages[0]['content'] }}"


def open_model(order: Any) -> Any:
    """The model behind its `Runner`."""
    if order["precision"] not in QUANTISED:
        raise loop.Refusal(f"{order['precision']} is none of the precisions asked of mistral.rs: {', '.join(QUANTISED)}")
    if order["mode"] not in ("plain", "mtp"):
        raise loop.Refusal(f"{order['mode']} is not to be had through mistral.rs's wheel")
    library = importlib.import_module("mistralrs")
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE, encoding="utf-8")
        options: dict[str, Any] = {"max_seqs": 1, "prefix_cache_n": 0, "jinja_explicit": str(template), "token_source": "none"}
        if QUANTISED[order["precision"]]:
            options["in_situ_quant"] = QUANTISED[order["precision"]]
        if order["mode"] == "mtp":
            options |= {"mtp_model": order["draft"] or order["model"], "mtp_n_predict": order["num_draft_tokens"]}
        dtype = library.ModelDType.F32 if order["precision"] == "f32" else library.ModelDType.BF16
        model = str(readable(Path(order["model"])))
        runner = library.Runner(which=library.Which.Plain(model_id=model, dtype=dtype), **options)
    note = ", ".join(f"{name}={value}" for name, value in options.items() if name in ("in_situ_quant", "mtp_n_predict"))
    version = importlib.metadata.version("mistralrs")
    return loop.Opened("mistral.rs", version, note, lambda request, arrived: _generate(library, runner, request, arrived))


def readable(path: Path) -> Path:
    """The directory, or one beside whose config has `rope_theta` where mistral.rs looks for it."""
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


def _generate(library: Any, runner: Any, request: Any, arrived: Any) -> Any:
    prompt = list(request["prompt_ids"])
    text = runner.detokenize_text(prompt, False)
    if list(runner.tokenize_text(text, False, False)) != prompt:
        raise loop.Refusal("mistral.rs takes text, and this prompt's text is tokenised to other ids")
    chunks = runner.send_chat_completion_request(
        library.ChatCompletionRequest(
            messages=[{"role": "user", "content": text}],
            model="default",
            max_tokens=request["max_tokens"],
            temperature=request["temperature"] or None,
            logprobs=True,
            top_logprobs=1,
            stream=True,
            ignore_eos=True,
        )
    )
    token_ids: list[int] = []
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.logprobs is not None:
                token_ids.append(choice.logprobs.top_logprobs[0].token)
                arrived(1)
    return loop.Generated(token_ids)


if __name__ == "__main__":
    loop.serve(open_model)

"""Runs transformers on the CPU. Started by the environment's own Python.

Settings of its guide to assisted generation: a draft model with a constant number of tokens, 5 by default, which stops
where the probability of a token falls below 0.4 (`assistant_confidence_threshold`); `prompt_lookup_num_tokens=10` with n-grams of up to 2.
bf16 and f32 as they are; int8 by torch's dynamic quantisation of linear layers, the one it has kernels for on any CPU. It does not say
how many tokens were drafted.
"""

import importlib
from typing import Any

loop = importlib.import_module("worker_loop")

DRAFT_TOKENS, MIN_PATH_PROBABILITY = 5, 0.4
LOOKUP_TOKENS, LOOKUP_NGRAM = 10, 2
DTYPES = {"bf16": "bfloat16", "f32": "float32", "int8": "float32"}


def open_model(command: Any) -> Any:
    """Open the model, with the arguments of `generate` that enable drafting."""
    if command["precision"] not in DTYPES:
        raise loop.PeerError(f"{command['precision']} has no path on the CPU in transformers: use one of {', '.join(DTYPES)}")
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(command["threads"])
    torch.set_grad_enabled(False)
    model = _load(transformers, torch, command["model"], command["precision"])
    count = command["num_speculative_tokens"]
    options: dict[str, Any] = {}
    note = "plain generate"
    if command["mode"] == "draft_model":
        assistant = _load(transformers, torch, command["draft"], command["precision"])
        assistant.generation_config.num_assistant_tokens = count or DRAFT_TOKENS
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = MIN_PATH_PROBABILITY
        options = {"assistant_model": assistant}
        note = f"assistant_model, num_assistant_tokens={count or DRAFT_TOKENS}, assistant_confidence_threshold={MIN_PATH_PROBABILITY}"
    elif command["mode"] == "ngram":
        options = {"prompt_lookup_num_tokens": count or LOOKUP_TOKENS, "max_matching_ngram_size": LOOKUP_NGRAM}
        note = ", ".join(f"{name}={value}" for name, value in options.items())
    version = f"{transformers.__version__}, torch {torch.__version__}"
    return loop.Opened("transformers", version, note, lambda request, arrived: _generate(torch, model, options, request, arrived))


def _load(transformers: Any, torch: Any, directory: str, precision: str) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, DTYPES[precision])).eval()
    model.generation_config.eos_token_id = None  # end tokens are tokens like others
    model.generation_config.pad_token_id = 0
    if precision == "int8":
        quantization = importlib.import_module("torch.ao.quantization")
        model = quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    return model


class Streamer:
    """Callback of `generate`: the prompt first, then arriving tokens."""

    def __init__(self, arrived: Any) -> None:
        self._arrived = arrived
        self._has_begun = False

    def put(self, token_ids: Any) -> None:
        if self._has_begun:
            self._arrived(token_ids.numel())
        self._has_begun = True

    def end(self) -> None:
        """Do nothing: no tokens are buffered."""


def _generate(torch: Any, model: Any, options: Any, request: Any, arrived: Any) -> Any:
    wanted, prompt = request["max_tokens"], request["prompt_ids"]
    law = {"do_sample": request["temperature"] > 0}
    if law["do_sample"]:
        torch.manual_seed(request["seed"])
        law |= {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
    token_ids = torch.tensor([prompt])
    output = model.generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        min_new_tokens=wanted,
        max_new_tokens=wanted,
        streamer=Streamer(arrived),
        **options,
        **law,
    )
    return loop.Generated(output[0, len(prompt) :].tolist())


if __name__ == "__main__":
    loop.serve(open_model)

"""Memory of opening a model and filling its context in a separate process, compared with doctor's estimate: JSON on stdout.

python -m harness.load_memory MODEL QUANT CONTEXT [DRAFT_MODEL]
"""

import gc
import json
import sys
from pathlib import Path

from harness.doctor_options import doctor_options
from paceline import LLM, SamplingParams
from paceline.proof.doctor import diagnose

_GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)


def memory() -> dict[str, int]:
    """Bytes in memory now, and most since the last reset."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.startswith("Vm")}
    return {"now": 1024 * int(values["VmRSS"]), "peak": 1024 * int(values["VmHWM"])}


def measure(model: str, quantization: str, context: int, drafts: list[str]) -> dict[str, int]:
    told = diagnose(doctor_options(model=model, drafters=drafts or ["none"], quantization=quantization, max_model_len=context)).memory
    assert told is not None
    small = LLM("mini", max_model_len=64, max_num_seqs=1)  # all that is imported and allocated once
    small.generate([[1, 2, 3]], _GREEDY)
    small.close()
    del small
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # what was most so far counts no more
    before = memory()
    llm = LLM(model, quantization=quantization, max_model_len=context, max_num_seqs=1, drafter=drafts or "none")
    opened = memory()
    llm.generate([[token % 200 for token in range(context - 8)]], _GREEDY)
    filled = memory()
    return {
        "weights": told.weights_bytes,
        "told": told.full_context_bytes,
        "opened_peak": opened["peak"] - before["now"],
        "opened": opened["now"] - before["now"],
        "peak": filled["peak"] - before["now"],
        "filled": filled["now"] - before["now"],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4:])) + "\n")

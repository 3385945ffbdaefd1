"""Lists in docs/models.md what the code runs: `python tools/list_models.py` prints the tables, `--write` puts them between their markers.

What is read is taken from the code; what models are called and which drafters are published for them is written down here, and a test
compares the page with both.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill

from paceline.drafters import HEADS
from paceline.drafters.head_kinds import HeadKind
from paceline.models.containers.table import METHODS
from paceline.models.families import FAMILIES
from paceline.models.family import Family
from paceline.models.gguf.blocks import GROUPED_TYPES
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.wrappers import WRAPPERS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
NONE = "–"
WIDTH = 120

MODELS: Mapping[str, str] = {
    "llama": "Llama 1 to 3.3, and what has their shape (Vicuna, TinyLlama, SmolLM2, Yi)",
    "mistral": "Mistral 7B, Mistral Nemo, Mistral Small 3 (text)",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "mimo": "MiMo 7B",
    "phi3": "Phi-3, Phi-3.5, Phi-4-mini",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "exaone4": "EXAONE 4",
    "granite": "Granite 3",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
    "ministral3": "Ministral 3 (text)",
    "glm4": "GLM-4-0414",
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3_moe": "Qwen3-MoE",
    "olmoe": "OLMoE",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "gpt_oss": "gpt-oss",
    "gemma4_text": "Gemma 4 (text)",
    "gemma4_unified_text": "Gemma 4 unified (text)",
    "qwen3_next": "Qwen3-Next, Qwen3-Coder-Next",
    "qwen3_5_text": "Qwen3.5, Qwen3.6 (text)",
    "qwen3_5_moe_text": "Qwen3.5-MoE, Qwen3.6-MoE (text)",
    "lfm2": "LFM2, LFM2.5",
    "lfm2_moe": "LFM2-MoE",
    "granitemoehybrid": "Granite 4",
    "nemotron_h": "Nemotron-H, Nemotron Nano 2, Nemotron 3",
}
"""What the models of a family are called."""

OF_ANOTHER: Mapping[str, str] = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "gemma4_unified_text": "gemma4"}
"""Families whose GGUF files name the architecture of another one."""

BROUGHT: Mapping[str, tuple[str, ...]] = {
    "mimo": ("mtp",),
    "glm4_moe": ("mtp",),
    "qwen3_next": ("mtp",),
    "qwen3_5_text": ("mtp",),
    "qwen3_5_moe_text": ("mtp",),
    "gemma4_text": ("gemma4_assistant",),
    "gemma4_unified_text": ("gemma4_assistant",),
}
"""Drafters that a family's publisher trained with it; listed once they can be used."""

PUBLISHED: Mapping[str, tuple[str, ...]] = {
    "llama": ("medusa", "eagle", "eagle3"),
    "qwen2": ("eagle",),
    "qwen3": ("eagle3",),
    "mixtral": ("eagle",),
    "gpt_oss": ("eagle3",),
}
"""Heads that others trained for models of a family."""

_PLAIN = ("F32", "F16", "BF16")
_NUMBERS = ("F64", "I8", "I16", "I32", "I64")  # no forms of weights


def families() -> str:
    """The table of families: one line each, in the order of the code."""
    rows = []
    for family in FAMILIES.values():
        architecture = f"`{_gguf(family)}`" if _gguf(family) else NONE
        packed = "; MXFP4 experts" if family.packs_experts else ""
        name = f"{MODELS[family.name]} | `{family.name}`"
        rows.append(f"| {name} | f32, f16, bf16{packed} | {architecture} | {_usable(BROUGHT, family)} | {_usable(PUBLISHED, family)} |")
    head = "| models | `model_type` | safetensors | GGUF architecture | drafters they bring | heads others trained |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def forms() -> str:
    """The table of forms that weights may have."""
    return "\n".join(
        [
            "| form | read from | held as |",
            "|---|---|---|",
            "| f32, f16, bf16 | safetensors, GGUF (F32, F16, BF16) | stored bytes, unpacked in registers |",
            f"| {', '.join(GROUPED_TYPES)} | GGUF | the file's own values, in groups of integer codes |",
            f"| MXFP4 experts | safetensors of {_named(one.name for one in FAMILIES.values() if one.packs_experts)} | the same |",
            *(f"| {method.title} | safetensors | {method.held} |" for method in METHODS.values()),
            "| int8, int4 (`--quantization`) | made while loading, of any of these | groups of 128 columns |",
        ]
    )


def refused() -> str:
    """What is known by name and refused: heads of methods without a drafter, and block types."""
    heads = [kind.value for kind in HeadKind if kind not in HEADS and kind is not HeadKind.LANGUAGE_MODEL]
    blocks = [kind.name for kind in BLOCK_TYPES.values() if kind.name not in (*_PLAIN, *_NUMBERS, *GROUPED_TYPES)]
    return f"* Heads of the methods {_named(heads)}.\n* GGUF block types {', '.join(blocks)}."


def wrappers() -> str:
    """The models of texts and images whose text model runs."""
    text = f"The text models inside {_named(WRAPPERS)} run, if the table above has them."
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


BLOCKS = {"families": families, "wrappers": wrappers, "forms": forms, "refused": refused}
"""What makes each table, by its marker."""


def written(page: str) -> str:
    """The page with every table between its markers.

    Raises:
        ValueError: a marker is missing.
    """
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        if begin not in page or end not in page:
            raise ValueError(f"the page has no {begin} … {end}: put both lines where the table belongs")
        before, rest = page.split(begin, 1)
        page = f"{before}{begin}\n{make()}\n{end}{rest.split(end, 1)[1]}"
    return page


def _gguf(family: Family) -> str | None:
    return family.gguf or OF_ANOTHER.get(family.name)


def _usable(table: Mapping[str, tuple[str, ...]], family: Family) -> str:
    """Those that can be used."""
    known = {kind.value for kind in HEADS}
    return _named(name for name in table.get(family.name, ()) if name in known) or NONE


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(arguments: list[str]) -> int:
    if arguments == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    elif not arguments:
        print("\n\n".join(make() for make in BLOCKS.values()))
    else:
        print("usage: list_models.py [--write]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""List in docs/models.md what the code runs: `python tools/list_models.py [--write]`."""

from collections.abc import Iterable
from textwrap import fill

from paceline.drafters import HEAD_OPENERS
from paceline.drafters.head_kinds import HeadKind
from paceline.models.families.table import FAMILIES
from paceline.models.gguf.blocks import QUANTIZED_BLOCK_TYPES
from paceline.models.gguf.header import BLOCK_TYPES
from paceline.models.multimodal import MULTIMODAL_MODELS
from paceline.models.quantized_formats.table import METHODS
from page_blocks import REPOSITORY, run

PAGE = REPOSITORY / "docs" / "models.md"
NONE = "–"
WIDTH = 120

_PLAIN = ("F32", "F16", "BF16")
_NUMBERS = ("F64", "I8", "I16", "I32", "I64")  # no forms of weights


def families() -> str:
    """The table of families: one line each, in the order of the code."""
    rows = []
    for family in FAMILIES.values():
        own = FAMILIES[family.gguf_family].gguf if family.gguf_family is not None else family.gguf
        architecture = f"`{own.architectures[0]}`" if own is not None else NONE
        packed = "; MXFP4 experts" if family.has_mxfp4_experts else ""
        drafters = f"{_usable(family.bundled_drafters)} | {_usable(family.third_party_head_methods)}"
        rows.append(f"| {family.model_names} | `{family.name}` | f32, f16, bf16{packed} | {architecture} | {drafters} |")
    head = "| models | `model_type` | safetensors | GGUF architecture | drafters by the publisher | published heads |"
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def forms() -> str:
    """The table of forms that weights may have."""
    return "\n".join(
        [
            "| form | read from | held as |",
            "|---|---|---|",
            "| f32, f16, bf16 | safetensors, GGUF (F32, F16, BF16) | stored bytes, unpacked in registers |",
            f"| {', '.join(QUANTIZED_BLOCK_TYPES)} | GGUF | the file's own values, in groups of integer codes |",
            f"| MXFP4 experts | safetensors of {_named(one.name for one in FAMILIES.values() if one.has_mxfp4_experts)} | the same |",
            *(f"| {method.title} | safetensors | {method.memory_format} |" for method in METHODS.values()),
            "| int8, int4 (`--quantization`) | made while loading, of any of these | groups of 128, 64 or 32 columns |",
        ]
    )


def refused() -> str:
    """What is known by name and refused: heads of methods without a drafter, and block types."""
    heads = [kind.value for kind in HeadKind if kind not in HEAD_OPENERS and kind is not HeadKind.LANGUAGE_MODEL]
    blocks = [kind.name for kind in BLOCK_TYPES.values() if kind.name not in (*_PLAIN, *_NUMBERS, *QUANTIZED_BLOCK_TYPES)]
    return f"* Heads of the methods {_named(heads)}.\n* GGUF block types {', '.join(blocks)}."


def wrappers() -> str:
    """The models of texts and images whose text model runs."""
    text = f"The text models inside {_named(MULTIMODAL_MODELS)} run, if the table above has them."
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


BLOCKS = {"families": families, "wrappers": wrappers, "forms": forms, "refused": refused}
"""What makes each table, by its marker."""


def _usable(drafters: Iterable[str]) -> str:
    """Those that can be used."""
    known = {kind.value for kind in HEAD_OPENERS}
    return _named(name for name in drafters if name in known) or NONE


def _named(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    run(PAGE, BLOCKS, __doc__ or "")

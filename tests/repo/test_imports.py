"""Imports point down one table of arrows, and the drawing of them in ARCHITECTURE.md is the real one."""

from collections.abc import Iterable

import pytest

from draw_imports import BLOCKS, PACKAGE, PAGE, Import, imports, modules
from page_blocks import with_blocks

# Who may import whom. A target is a file or a folder with all its files; `x.__init__` is only what the folder x itself exports.
# Everyone may import `errors`, a folder its own files.
LEAVES = {"config", "installation", "isolated", "model_directory", "small_files", "spelling"}
SPECULATION = {*LEAVES, "runtimes.base", "runtimes.cost", "sampling", "kv_cache", "tokenizer"}
DRAFTERS = {*LEAVES, "speculation", "runtimes", "models", "sampling", "kv_cache", "hub", "tokenizer"}
ENGINE = {
    *LEAVES,
    "machine",
    "drafters.__init__",
    "speculation",
    "runtimes",
    "kv_cache",
    "sampling",
    "tokenizer",
    "parsing",
    "models",
    "outputs",
    "hub",
}
LLM = {*ENGINE, "engine"}
ABOVE_LLM = {*LLM, "llm"}
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "machine": set(),
    "config": {"machine"},
    "small_files": set(),
    "prompt_file": {"small_files"},
    "repeats": set(),
    "model_directory": {"small_files"},
    "installation": set(),
    "isolated": set(),
    "spelling": set(),
    "hub": LEAVES,
    "tokenizer": {*LEAVES, "models.gguf.file"},
    "models": LEAVES,
    "kv_cache": LEAVES,
    "runtimes": {*LEAVES, "machine", "models", "kv_cache", "sampling.path_sampler"},
    "sampling": {*LEAVES, "tokenizer"},
    "parsing": {*LEAVES, "tokenizer", "sampling", "outputs"},
    "speculation": SPECULATION,
    "drafters": DRAFTERS,
    "engine": ENGINE,
    "llm": LLM,
    "training": {*ABOVE_LLM, "repeats", "__init__", "drafters"},
    "benchmarking": {*ABOVE_LLM, "prompt_file", "repeats", "__init__"},
    "proof": {*ABOVE_LLM, "prompt_file", "repeats", "drafters"},
    "server": {*ABOVE_LLM, "__init__"},
    "outputs": {"sampling.logprobs", "speculation.request", "speculation.stats"},
    "cli": {
        *LEAVES,
        "__init__",
        "hub",
        "prompt_file",
        "tokenizer",
        "server",
        "training",
        "benchmarking",
        "proof",
        "llm",
        "outputs",
        "sampling.defaults",
        "sampling.params",
        "speculation.request",
    },
    # the public names, resolved on first access
    "__init__": {
        *LEAVES,
        "llm",
        "engine.async_engine",
        "engine.inputs",
        "engine.request",
        "outputs",
        "parsing.parse_output",
        "sampling.params",
        "sampling.grammars.grammar",
    },
    "__main__": {"cli.__init__"},
}

# The bookkeeping of a request: testable and readable without a tensor library.
WITHOUT_TORCH = ["engine.scheduler", "kv_cache.block_pool", "kv_cache.block_pool", "kv_cache.row_plan", "speculation.request"]
WITHOUT_TORCH += ["__init__", "errors", "config", "hub", "sampling.params", "speculation.tree", "speculation.stats", "cli.__init__"]

# The only places that import torch when they are imported; elsewhere it is looked for where it is needed.
WITH_TORCH = ("runtimes.torch.", "training.")


def _describe(found: Iterable[Import]) -> list[str]:
    return [f"{one.source} line {one.line} imports {one.target}" for one in found]


def _is_below(name: str, allowed: str) -> bool:
    return name == allowed or name.startswith(f"{allowed}.")


def test_import_table_contains_every_package() -> None:
    assert {name.split(".")[0] for name in modules()} - set(ARROWS) == set()


def test_imports_between_packages_follow_the_import_table() -> None:
    wrong = [
        one
        for one in imports(PACKAGE)
        if one.internal
        and one.source_part != one.target_part
        and one.target_part != "errors"
        and not any(_is_below(one.target, allowed) for allowed in ARROWS[one.source_part])
    ]
    assert _describe(wrong) == []


# Drafters may import these: the shared parts of heads, and what they are made for.
SHARED_BY_DRAFTERS = {
    "draft_sampler", "draft_vocab", "head_cache", "head_files", "head_kinds", "options", "recurrent_heads", "target", "translate",
}  # fmt: skip


def test_drafters_do_not_import_each_other() -> None:
    """Except the table, with the options of its entries."""
    wrong = [
        one
        for one in imports(PACKAGE)
        if one.source.startswith("drafters.")
        and one.target.startswith("drafters.")
        and one.source.split(".")[1] not in {"__init__", "options", one.target.split(".")[1]}
        and one.target.split(".")[1] not in SHARED_BY_DRAFTERS
    ]
    assert _describe(wrong) == []


def test_import_table_has_no_cycle() -> None:
    def reachable(part: str, seen: tuple[str, ...]) -> None:
        assert part not in seen, " -> ".join([*seen, part])
        for target in ARROWS[part]:
            if target != "__init__":
                reachable(target.split(".")[0], (*seen, part))

    reachable("cli", ())


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_torch_free_modules_import_torch_neither_directly_nor_indirectly(module: str) -> None:
    """Neither itself nor through anything it imports."""
    everything = imports(PACKAGE)
    chains = {module: module}
    pending = [module]
    while pending:
        source = pending.pop()
        for one in everything:
            # a deferred import of its own counts as well: such a file has no torch at all
            if one.source != source or not (one.at_import or source == module):
                continue
            assert one.target.split(".")[0] != "torch", f"{chains[source]} -> torch (line {one.line})"
            if one.internal and one.at_import and one.target not in chains:
                chains[one.target] = f"{chains[source]} -> {one.target}"
                pending.append(one.target)


def test_only_the_torch_runtime_imports_torch() -> None:
    wrong = [
        one for one in imports(PACKAGE) if one.at_import and one.target.split(".")[0] == "torch" and not one.source.startswith(WITH_TORCH)
    ]
    assert _describe(wrong) == []


def test_import_figure_of_the_architecture_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == with_blocks(page, BLOCKS), "python tools/draw_imports.py --write redraws it"

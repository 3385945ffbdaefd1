"""Commands and options that users of llama.cpp and Ollama type here by habit, and what to type instead."""

from collections.abc import Mapping

OTHER_COMMANDS: Mapping[str, str] = {
    **dict.fromkeys(("list", "ls", "ps", "rm", "cp"), "models are files and directories that you name; the Hub's cache: hf cache ls"),
    **dict.fromkeys(("pull", "download"), "paceline run owner/name gets a model from the Hugging Face Hub when it first needs it"),
    **dict.fromkeys(("show", "info", "inspect"), "paceline doctor MODEL"),
    **dict.fromkeys(("create", "push", "stop", "signin", "login"), "models are files and directories that you name, without a registry"),
    **dict.fromkeys(("server", "start", "llama-server"), "paceline serve MODEL"),
    **dict.fromkeys(("cli", "generate", "complete", "completion", "llama-cli", "simple"), 'paceline run MODEL "TEXT"'),
    **dict.fromkeys(("interactive", "talk", "ollama"), "paceline chat MODEL"),
    "help": "paceline --help, or paceline COMMAND --help",
    "version": "paceline --version",
    "benchmark": "paceline bench MODEL",
    "llama-bench": "paceline bench MODEL",
}
"""What to use in place of a command of another program."""

_LEAVE_OUT = "leave it out: "
_CPU = _LEAVE_OUT + "all layers are computed on the CPU, or with --device cuda on a GPU"
_MAPPED = _LEAVE_OUT + "weights are used in the mapped file"
_ROWS = _LEAVE_OUT + "paceline divides prompts itself; paceline serve has --max-num-batched-tokens"
_CHAT = "paceline chat MODEL is for conversations, paceline run --chat for one answer"
_BOTH = "--kv-cache-dtype sets the type of keys and values together"
_MANY = "paceline serve has --max-num-seqs"
OTHER_OPTIONS: Mapping[str, str] = {
    **dict.fromkeys(("ngl", "gpu-layers", "n-gpu-layers", "num-gpu", "ngld", "gpu-layers-draft", "sm", "ts", "mg", "main-gpu"), _CPU),
    **dict.fromkeys(("cpu-moe", "cmoe", "n-cpu-moe", "ncmoe", "override-tensor", "ot"), _CPU),
    **dict.fromkeys(("fa", "flash-attn", "no-kv-offload", "nkvo", "numa", "poll", "prio"), _LEAVE_OUT + "there is no such choice"),
    **dict.fromkeys(("mlock", "no-mmap", "mmap", "no-repack"), _MAPPED),
    **dict.fromkeys(("b", "batch-size", "ub", "ubatch-size"), _ROWS),
    **dict.fromkeys(("tb", "threads-batch", "td", "threads-draft"), "--threads sets the threads of everything"),
    **dict.fromkeys(("cnv", "conversation", "i", "interactive", "interactive-first"), _CHAT),
    **dict.fromkeys(("no-cnv", "no-conversation", "st", "single-turn"), "paceline run completes a text, paceline run --chat answers once"),
    **dict.fromkeys(("ctk", "cache-type-k", "ctv", "cache-type-v"), _BOTH),
    **dict.fromkeys(("np", "parallel", "cb", "cont-batching"), _MANY),
    **dict.fromkeys(("f", "file"), "standard input is the text: paceline run MODEL < FILE"),
    **dict.fromkeys(("p", "prompt"), 'paceline run MODEL "TEXT" completes a text; paceline prove and bench take --prompts FILE'),
    **dict.fromkeys(("jinja", "e", "escape", "color", "co", "chat-template", "simple-io", "no-warmup"), _LEAVE_OUT + "it needs no option"),
    **dict.fromkeys(("metrics", "slots", "props", "nowordwrap"), _LEAVE_OUT + "it needs no option"),
    **dict.fromkeys(("rope-freq-base", "rope-freq-scale", "rope-scale", "rope-scaling"), _LEAVE_OUT + "the files of the model have it"),
    **dict.fromkeys(("mm", "mmproj", "image", "audio"), "only texts are read, no images and no sound"),
    **dict.fromkeys(("embedding", "embeddings", "reranking", "rerank"), "only texts are generated: another server gives embeddings"),
    **dict.fromkeys(("spec-type",), "--drafter"),
    **dict.fromkeys(("s", "seed-value"), "--seed"),
    **dict.fromkeys(("r", "reverse-prompt"), "--stop"),
    **dict.fromkeys(("sys", "system-prompt"), "--system"),
    **dict.fromkeys(("v", "verbose", "verbose-prompt", "log-verbose", "lv"), "--explain prints details, --debug tracebacks"),
    **dict.fromkeys(("mirostat", "typical", "xtc-probability", "dry-multiplier", "tfs"), "--top-k, --top-p and --min-p are the filters"),
    **dict.fromkeys(("repeat-last-n", "num-keep", "keep"), "--repetition-penalty counts the whole text, and nothing is shifted out"),
    **dict.fromkeys(("hf", "hfr", "hf-repo"), "give the id of the Hub as MODEL: owner/name"),
    **dict.fromkeys(("hff", "hf-file"), "--gguf-file"),
    **dict.fromkeys(("hfd", "hf-repo-draft"), "--drafter owner/name"),
    **dict.fromkeys(("mu", "model-url", "insecure"), "download the file, and give its path as MODEL"),
    **dict.fromkeys(("a", "alias"), "paceline serve has --served-model-name"),
    **dict.fromkeys(("lora", "lora-scaled"), "--adapter NAME=DIR or --merge-adapter DIR"),
    **dict.fromkeys(("grammar", "grammar-file", "json-schema", "j", "format"), "paceline serve takes a schema with each request"),
    **dict.fromkeys(("keepalive", "keep-alive", "sleep-idle-seconds"), "paceline serve has --unload-after"),
    **dict.fromkeys(("think", "hidethinking", "reasoning-format"), "paceline serve has --reasoning-parser"),
    **dict.fromkeys(("draft", "draft-max", "draft-n", "spec-draft-n-max"), "--num-speculative-tokens"),
    **dict.fromkeys(("draft-min", "draft-p-min"), _LEAVE_OUT + "the draft length follows from measured costs"),
    **dict.fromkeys(("lookup-cache-static", "lcs", "lookup-cache-dynamic", "lcd"), "--drafter suffix, or ngram"),
    **dict.fromkeys(("num-ctx", "context-size", "context-length"), "--max-model-len"),
    **dict.fromkeys(("num-predict",), "--max-tokens"),
    "quick": "paceline prove has --quick, paceline bench and train have --minutes",
}
"""What to use in place of an option of another program, by its name without dashes."""

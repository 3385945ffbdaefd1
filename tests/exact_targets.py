"""Names of the targets and compute types that tests/exact runs over."""

TARGETS = ["llama", "qwen2", "qwen3", "mini"]
DTYPES = ["f32", "bf16"]

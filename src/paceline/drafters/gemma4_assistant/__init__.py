"""Gemma 4's own drafters: small decoders that read the keys and values of their target."""

from paceline.drafters.gemma4_assistant.config import suits
from paceline.drafters.gemma4_assistant.drafter import open_assistant
from paceline.drafters.gemma4_assistant.gguf import open_gguf_assistant

__all__ = ["open_assistant", "open_gguf_assistant", "suits"]

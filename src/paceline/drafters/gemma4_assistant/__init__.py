"""Gemma 4's own drafters: small decoders that read the keys and values of their target."""

from paceline.drafters.gemma4_assistant.drafter import open_assistant

__all__ = ["open_assistant"]

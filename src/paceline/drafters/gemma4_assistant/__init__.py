"""Gemma 4's own drafters: small decoders that read the keys and values of their target."""

"""Honest numbers: what speculation brings here, beside plain decoding and beside other programs, on the same prompts in turns."""

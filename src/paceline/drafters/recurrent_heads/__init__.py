"""Shared by heads that feed themselves: each step pairs a token with the feature of the position before it (EAGLE, MTP, Gemma 4).

The networks are part of each method. Shared are the key-value rows of pairs (`cache.py`), the passes over pairs (`head.py`), the growth of
a draft (`tree.py`), and the drafters (`drafter.py`).
"""

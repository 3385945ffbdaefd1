"""What EAGLE, MTP and Gemma 4 drafters share. Their heads read their own output: to draft a token, they need a feature of the one before.

The input at a position is a feature pair: a token, and the feature (hidden state) of the position before it. The target computed the
feature if it has run that position; otherwise the head predicted it. Each method has its own network. The methods share the KV cache of
feature pairs (`cache.py`), the passes over them (`head.py`), the draft of a request (`tree.py`), and the drafters (`drafter.py`).
"""

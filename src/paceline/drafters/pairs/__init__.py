"""Shared by heads that join a token with the target's feature of the position before it: EAGLE and MTP.

Their networks differ and are kept with each method. Here are the rows they keep (`cache.py`), their passes (`head.py`), guesses from a row
(`guesses.py`), how a draft grows (`tree.py`), the drafter (`drafter.py`), and the search for conventions that files leave open
(`calibration.py`).
"""

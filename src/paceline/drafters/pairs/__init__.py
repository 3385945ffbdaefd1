"""What heads have in common that join a token with the target's feature of the position before it: EAGLE and MTP.

Their networks differ and stay with them. Here are the rows they keep (`cache.py`), their passes (`head.py`), what is guessed from a row
(`guesses.py`), how a draft grows (`tree.py`), the drafter (`drafter.py`), and how conventions that files leave open are found out
(`calibration.py`).
"""

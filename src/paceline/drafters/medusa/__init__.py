"""Medusa: each head predicts another future token from the target's last hidden state, so one pass drafts several positions."""

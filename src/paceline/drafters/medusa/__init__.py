"""Medusa heads: extra heads on the target's last feature draft several positions at once."""

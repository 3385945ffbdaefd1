"""Trains drafters for a target: data and features from our own engine, losses as published, files that our loaders read."""

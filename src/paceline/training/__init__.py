"""Trains drafters for a target: data and features from our own engine, losses as published, files that our loaders read."""

import os

# Otherwise torch and oneDNN keep 1,024 prepared matrix products each: about 10 MB for every new shape of a batch.
os.environ.setdefault("LRU_CACHE_CAPACITY", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")

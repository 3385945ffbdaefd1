"""Containers of quantised weights: what other tools write into safetensors files. `table.py` lists them, one file reads each."""

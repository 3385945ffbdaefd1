"""Containers of quantised weights, the formats that other tools write into safetensors files: one file each, listed in `table.py`."""

"""Containers of quantised weights: the formats of other tools in safetensors files, one module each, listed in `table.py`."""

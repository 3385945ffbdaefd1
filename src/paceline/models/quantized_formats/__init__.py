"""Formats in which other tools store quantised weights in safetensors files, one module each, listed in `table.py`."""

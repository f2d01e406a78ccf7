"""Shared code of the sparkpair modules: text, numbers and paths in, data out."""

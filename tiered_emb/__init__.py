"""Rows in motion: embedding tables larger than memory, for PyTorch."""

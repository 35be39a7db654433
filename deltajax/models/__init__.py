"""Transformers whose layers read over depth."""

"""Variants compared in pairs: same data, seeds and initial parameters."""

"""Saving, restoring and naming parameters."""

"""Pallas kernels behind `deltajax.routing`; they import nothing of the rest."""

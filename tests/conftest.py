"""Settings of the whole suite."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

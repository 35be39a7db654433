"""Whether a converted model still computes the model that it came from."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from deltajax.config import ModelConfig, RoutingConfig
from deltajax.models.transformer import (
  partitionable,
  split_routing,
  TransformerLM,
)

PROBE_SHAPE = (2, 16)
UNFUSED = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Probe:
  """Logits of a routed model beside those of its base, on one batch.

  Attributes:
    dtype: of the computation.
    equal: whether they are equal bit for bit.
    difference: largest absolute difference.
    size: largest absolute logit of the base.
  """

  dtype: str
  equal: bool
  difference: float
  size: float

  def __str__(self) -> str:
    same = (
      "equal bit for bit"
      if self.equal
      else f"differ by up to {self.difference:.2g}"
    )
    return f"{self.dtype}: {same}, logits up to {self.size:.3g}"


def is_exact(routing: RoutingConfig) -> bool:
  """Whether a newly routed model must equal its base bit for bit."""
  gate = routing.gate_function
  return gate is not None and gate.initial == 0 and routing.row.additive


def probe(config: ModelConfig, params: Mapping[str, Any], dtype: str) -> Probe:
  """Compares a routed model with the `standard` one of the same parameters.

  Both are compiled without optimisation, which may round one otherwise than
  the other where it fuses the read into a product.

  Args:
    config: of the routed model.
    params: its unboxed parameters.
    dtype: of the computation.
  """
  config = dataclasses.replace(partitionable(config), dtype=dtype)
  base = dataclasses.replace(config, routing=RoutingConfig(variant="standard"))
  base_params, _ = split_routing(params)
  tokens_BxT = np.random.default_rng(0).integers(
    config.vocab_size, size=PROBE_SHAPE, dtype=np.int32
  )
  expected = _logits(base, base_params, tokens_BxT)
  found = _logits(config, params, tokens_BxT)
  return Probe(
    dtype=dtype,
    equal=np.array_equal(found, expected, equal_nan=True),
    difference=float(np.abs(found - expected).max()),
    size=float(np.abs(expected).max()),
  )


def _logits(config: ModelConfig, params: Any, tokens_BxT: np.ndarray) -> Any:
  model = TransformerLM(config)
  apply = jax.jit(
    lambda params, tokens: model.apply({"params": params}, tokens),
    compiler_options=UNFUSED,
  )
  return np.asarray(apply(params, tokens_BxT).logits_BxTxV)

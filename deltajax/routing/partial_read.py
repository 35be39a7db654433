"""What a pass over the memory is given and returns.

Shapes: B batch, T sequence, D width, R reads, H heads, K key size.
"""

import dataclasses
from typing import Any, NamedTuple

import jax

from deltajax.kernels import MASKED as MASKED


class PartialRead(NamedTuple):
  """R reads of some of their sources, to be merged with the others.

  Attributes:
    mix_RxBxTxD: softmax-weighted sum of the sources; zero without any.
    lse_RxHxBxT: log of the sum of exp of their logits; `MASKED` without any.
  """

  mix_RxBxTxD: jax.Array
  lse_RxHxBxT: jax.Array


class Single(NamedTuple):
  """A source that is not in the memory.

  Attributes:
    x_BxTxD: the source; B and T may be 1 if it is the same for all tokens.
    visible: bool, whether it is read; may be traced.
  """

  x_BxTxD: jax.Array
  visible: Any


@dataclasses.dataclass(frozen=True)
class ReadCase:
  """What is static about a pass over the memory, on one device.

  Attributes:
    reads: R.
    heads: H.
    width: D.
    length: T.
    dtype: of the memory.
    eps: of the key norm.
    device_kind: of the devices, for example `TPU v5 lite`.
    compute_capability: of a GPU, for example `8.0`; None where not known.
  """

  reads: int
  heads: int
  width: int
  length: int
  dtype: str
  eps: float
  device_kind: str
  compute_capability: str | None = None

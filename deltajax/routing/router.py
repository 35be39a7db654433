"""The linen module that gives a sublayer what it reads.

Shapes: B batch, T sequence, D width, K key size, R reads, H heads, U roles, N
all sources of a read (null, slots, running).
"""

from flax import linen as nn
import jax
import jax.numpy as jnp

from deltajax.routing.depth_attention import (
  depth_attention,
  depth_attention_weights,
)
from deltajax.routing.memory import DepthState, Sources
from deltajax.routing.schedule import Step
from deltajax.routing.variants import Matrix, Roles, RoutingConfig

# Collection into which routing weights are captured where it is mutable.
CAPTURE = "routing"


class DepthRouter(nn.Module):
  """Turns the depth state into the input of one sublayer, for each role.

  Parameters (only those that the config needs): `query` [queries, K],
  `key_norm` [K], `gate` [], `null_source` [D].

  With `mutable="routing"` the routing weights alpha_RxHxNxBxT of every read
  are captured beside the result, which does not change.

  Attributes:
    routing: the variant and its options.
    roles: how queries become inputs: `routing.row.roles` for an attention
      sublayer, `routing.row.single_role` for an MLP or the final read.
    eps: of the key norm.
    implementation: of `depth_attention`; None for the best on the platform.
    param_dtype: dtype of the parameters.
  """

  routing: RoutingConfig
  roles: Roles
  eps: float
  implementation: str | None = None
  param_dtype: str = "float32"

  @nn.compact
  def __call__(self, state: DepthState, step: Step) -> jax.Array:
    """Returns inputs_UxBxTxD, one for each of the U roles.

    Args:
      state: the depth state before the sublayer.
      step: the sublayer's row of the schedule.
    """
    row = self.routing.row
    stream_BxTxD = state.stream_BxTxD
    queries_RxK = self._queries(stream_BxTxD.shape[-1])
    sources = self._sources(state, step)
    gate = self._gate()

    if self.is_mutable_collection(CAPTURE) and not self.is_initializing():
      weights = depth_attention_weights(
        queries_RxK, sources, self.routing.heads, self.eps
      )
      self.sow(CAPTURE, "weights", weights, reduce_fn=lambda _, new: new)

    reads_RxBxTxD = depth_attention(
      queries_RxK,
      sources.memory_SxBxTxD,
      visible=sources.visible,
      running_BxTxD=sources.running_BxTxD,
      running_visible=sources.running_visible,
      stream_BxTxD=stream_BxTxD if row.additive and gate is None else None,
      null_D=sources.null_D,
      heads=self.routing.heads,
      key_dim=self.routing.key_dim,
      eps=self.eps,
      implementation=self.implementation,
    )
    inputs_UxBxTxD = _combine(self.roles.inputs, reads_RxBxTxD)
    if gate is None:
      return inputs_UxBxTxD
    added = gate * inputs_UxBxTxD.astype(gate.dtype)
    return stream_BxTxD + added.astype(stream_BxTxD.dtype)

  def _queries(self, width: int) -> jax.Array:
    """Query times key norm, for each read."""
    size = self.routing.key_size(width)
    if self.roles.num_queries == 0:
      return jnp.zeros((self.roles.num_reads, size), self.param_dtype)
    std = self.routing.query_init_std
    query_QxK = self._param(
      "query",
      nn.initializers.normal(std) if std else nn.initializers.zeros,
      ("queries", "embed"),
      (self.roles.num_queries, size),
    )
    key_norm_K = self._param(
      "key_norm", nn.initializers.ones, ("embed",), (size,)
    )
    return _combine(self.roles.queries, query_QxK * key_norm_K)

  def _sources(self, state: DepthState, step: Step) -> Sources:
    null_D = None
    if self.routing.null_source:
      null_D = self._param(
        "null_source",
        nn.initializers.zeros,
        ("embed",),
        (state.stream_BxTxD.shape[-1],),
      )
    running_source = {
      "none": None,
      "delta": state.running_BxTxD,
      "stream": state.stream_BxTxD,
    }
    return Sources(
      null_D=null_D,
      memory_SxBxTxD=state.memory.slots_SxBxTxD,
      visible=step.visible,
      running_BxTxD=running_source[self.routing.row.running_source],
      running_visible=step.reads_running,
    )

  def _gate(self) -> jax.Array | None:
    gate = self.routing.gate_function
    if gate is None or not self.routing.row.additive:
      return None
    initial = nn.initializers.constant(gate.initial)
    return gate.function(self._param("gate", initial, (), ()))

  def _param(self, name, init, axes, shape) -> jax.Array:
    init = nn.with_logical_partitioning(init, axes)
    return self.param(name, init, shape, jnp.dtype(self.param_dtype))


def _combine(matrix: Matrix, stacked: jax.Array) -> jax.Array:
  """Rows of `matrix @ stacked`; ones and zeros cost nothing and are exact."""
  rows = []
  for coefficients in matrix:
    terms = [
      x if c == 1 else c * x
      for c, x in zip(coefficients, stacked, strict=True)
      if c != 0
    ]
    rows.append(sum(terms[1:], start=terms[0]) if terms else None)
  zero = jnp.zeros_like(stacked[0])
  return jnp.stack([zero if row is None else row for row in rows])

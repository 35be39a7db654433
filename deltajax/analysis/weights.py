"""Routing weights of all reads of a model at once, after it has run.

Sources never change once they are stored, and queries do not depend on
activations: with the final memory and what sublayers put out, the logits of all
reads are one matrix product, where weights taken read by read would norm every
source again for each. `DepthRouter` captures the same weights for models that
run otherwise.

Shapes: L layers, R reads, H heads, N columns (null, slots, running), S slots, B
batch, T sequence, D width, K key size.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from deltajax.models.transformer import DecoderLayer, TransformerLM
from deltajax.routing.partial_read import MASKED
from deltajax.routing.schedule import build_schedule
from deltajax.routing.streaming import by_head, wide_dtype

ROUTERS = ("attention_router", "mlp_router")
FINAL = "final_router"


def running_sources(
  model: TransformerLM, outputs_SxBxTxD: jax.Array, streams_SxBxTxD: jax.Array
) -> jax.Array | None:
  """The running source before each sublayer and the final read, [2L + 1].

  Args:
    model: the model.
    outputs_SxBxTxD: what its sublayers put out, [2L].
    streams_SxBxTxD: the stream before each and after the last.
  """
  config = model.config
  kind = config.routing.row.running_source
  if kind != "delta":
    return streams_SxBxTxD if kind == "stream" else None
  schedule = build_schedule(config.routing, config.num_layers)

  def add(running_BxTxD, xs):
    output_BxTxD, closes = xs
    added_BxTxD = running_BxTxD + output_BxTxD
    return jnp.where(closes, 0, added_BxTxD), running_BxTxD

  dtype = streams_SxBxTxD.dtype
  last_BxTxD, before_SxBxTxD = jax.lax.scan(
    add,
    jnp.zeros_like(streams_SxBxTxD[0]),
    (outputs_SxBxTxD.astype(dtype), jnp.asarray(schedule.steps.closes)),
  )
  return jnp.concatenate([before_SxBxTxD, last_BxTxD[None]])


def routing_weights(
  model: TransformerLM,
  params: Any,
  slots_SxBxTxD: jax.Array,
  running_SxBxTxD: jax.Array | None,
  seen: dict[str, np.ndarray],
) -> dict[str, jax.Array]:
  """Weights_LxRxHxNxBxT of each router; 0 in columns that a layer does not see.

  Args:
    model: the model.
    params: its unboxed parameters.
    slots_SxBxTxD: the final memory.
    running_SxBxTxD: see `running_sources`.
    seen: seen_LxN of the routers whose weights are wanted.
  """
  layer = DecoderLayer(model.config, parent=None)
  both: Any = jax.vmap(lambda x: layer.apply({"params": x}, method="queries"))(
    params["layers"]
  )
  queries = dict(zip(ROUTERS, both, strict=True))
  if FINAL in seen:
    final: Any = model.apply(
      {"params": params}, method=lambda module: module.final_router.queries()
    )
    queries[FINAL] = final[None]
  places = {name: slice(i, -1, 2) for i, name in enumerate(ROUTERS)}
  places[FINAL] = slice(-1, None)
  logits = _Logits(model.config.routing.heads, model.config.norm_eps)
  weights = {}
  for name, seen_LxN in seen.items():
    queries_LxRxK = queries[name]
    kinds = [logits.of_slots(queries_LxRxK, slots_SxBxTxD)]
    if model.config.routing.null_source:
      router = params[FINAL] if name == FINAL else params["layers"][name]
      null_LxD = router["null_source"].reshape(len(queries_LxRxK), -1)
      null_LxD = null_LxD.astype(slots_SxBxTxD.dtype)
      null = logits.of_own(queries_LxRxK, null_LxD[:, None, None])
      shape = (*null.shape[:-2], *slots_SxBxTxD.shape[1:3])
      kinds.insert(0, jnp.broadcast_to(null, shape)[:, :, :, None])
    if running_SxBxTxD is not None:
      running_LxBxTxD = running_SxBxTxD[places[name]]
      own = logits.of_own(queries_LxRxK, running_LxBxTxD)
      kinds.append(own[:, :, :, None])
    logits_LxRxHxNxBxT = jnp.concatenate(kinds, axis=3)
    mask = seen_LxN[:, None, None, :, None, None]
    masked = jnp.where(mask, logits_LxRxHxNxBxT, MASKED)
    weights[name] = jnp.where(mask, jax.nn.softmax(masked, axis=3), 0)
  return weights


class _Logits:
  """Logits of queries and keys, which are normed over their last axis."""

  def __init__(self, heads: int, eps: float):
    self._heads = heads
    self._eps = eps

  def of_slots(self, queries_LxRxK, x_SxBxTxD) -> jax.Array:
    """Of all queries with all slots, [L, R, H, S, B, T]."""
    keys, rstd_SxBxT = self._keys(queries_LxRxK, x_SxBxTxD)
    return self._dots("lrhk,sbthk->lrhsbt", queries_LxRxK, keys) * rstd_SxBxT

  def of_own(self, queries_LxRxK, x_LxBxTxD) -> jax.Array:
    """Of each layer's queries with a source of its own, [L, R, H, B, T]."""
    keys, rstd_LxBxT = self._keys(queries_LxRxK, x_LxBxTxD)
    dots_LxRxHxBxT = self._dots("lrhk,lbthk->lrhbt", queries_LxRxK, keys)
    return dots_LxRxHxBxT * rstd_LxBxT[:, None, None]

  def _keys(self, queries_LxRxK, x) -> tuple[jax.Array, jax.Array]:
    keys = x[..., x.shape[-1] - queries_LxRxK.shape[-1] :]
    keys = keys.astype(wide_dtype(x))
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(keys), -1) + self._eps)
    return by_head(keys, self._heads), rstd

  def _dots(self, equation, queries_LxRxK, keys) -> jax.Array:
    return jnp.einsum(
      equation,
      by_head(queries_LxRxK.astype(keys.dtype), self._heads),
      keys,
      precision=jax.lax.Precision.HIGHEST,
    )

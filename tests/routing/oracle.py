"""The papers' equations in NumPy float64: an oracle for whole models.

Independent of the package: what a sublayer may read is recomputed for every
sublayer from all the vectors so far, kept in Python lists; norms are applied
to keys, not folded into queries; nothing is stacked, masked or scanned. Only
the names of parameters and of config fields are shared.

In every function of `SOURCES`: s the sublayer, e the embedding, v the outputs
v_0 .. v_{s-1}, p the streams p_0 .. p_s, size the sublayers in a block.
"""

import math

import numpy as np


def _none(s, e, v, p, size):
  return []


def _embedding(s, e, v, p, size):
  return [e]


def _full(s, e, v, p, size):
  return [e, *v]


def _blocks(s, e, v, p, size):
  closed = [sum(v[i : i + size]) for i in range(0, s - size + 1, size)]
  running = v[len(closed) * size :]
  return [e, *closed, *([sum(running)] if running else [])]


def _closed_blocks(s, e, v, p, size):
  return [e, *(sum(v[i : i + size]) for i in range(0, s - size + 1, size))]


def _released(s, e, v, p, size):
  memory = []
  for boundary in range(0, s, size):  # attention of earlier boundary layers
    memory.append(p[boundary] - memory[-1] if memory else p[boundary])
  return memory


def _states(s, e, v, p, size):
  return p[1:]


def _all_states(s, e, v, p, size):
  return p


def _deltas_and_stream(s, e, v, p, size):
  return [*v, p[-1]]


def _from_second(sources):
  """The first sublayer reads nothing."""
  return lambda s, *rest: sources(s, *rest) if s else []


SOURCES = {
  "standard": _none,
  "attnres_full": _full,
  "attnres_block": _blocks,
  "delta": _from_second(_full),
  "delta_block": _from_second(_blocks),
  "delta_block_closed": _from_second(_closed_blocks),
  "delta_block_released": _released,
  "rd_attnres": _blocks,
  "rd_delta": _from_second(_full),
  "rd_delta_block": _from_second(_blocks),
  "rd_tied": _blocks,
  "rd_average": _blocks,
  "rd_frozen_v": _blocks,
  "full_additive": _states,
  "delta_replace": _deltas_and_stream,
  "full_replace": _all_states,
  "embedding_skip": _embedding,
  "embedding_skip_scaled": _embedding,
}
REPLACING = {
  "attnres_full",
  "attnres_block",
  "rd_attnres",
  "rd_tied",
  "rd_average",
  "rd_frozen_v",
  "delta_replace",
  "full_replace",
}
FINAL_READ = REPLACING - {"delta_replace", "full_replace"}


def model_logits(
  config,
  params,
  tokens,
  segment_ids=None,
  positions=None,
  weights=None,
  vectors=None,
  probes=None,
):
  """Logits [B, T, V] of a ModelConfig with (NumPy, layer-stacked) params.

  A list `weights` gets, for each sublayer and the final read, the list of the
  alpha_HxNxBxT of its reads. A dictionary `vectors` gets `v` and `p`, and as
  `inputs` the two of every sublayer before its norm. `probes`, sublayer ->
  array, are added to what sublayers put out.
  """
  weights = [] if weights is None else weights
  vectors = {} if vectors is None else vectors
  batch, length = tokens.shape
  if segment_ids is None:
    segment_ids = np.zeros((batch, length), int)
  if positions is None:
    positions = np.tile(np.arange(length), (batch, 1))
  num_blocks, variant = config.routing.num_blocks, config.routing.variant
  size = 2 * math.ceil(config.num_layers / num_blocks)
  eps = config.norm_eps

  e = params["embedding"][tokens]
  v, p, inputs = [], [e], []
  vectors.update(v=v, p=p, inputs=inputs)
  for s in range(2 * config.num_layers):
    layer = _layer(params["layers"], s // 2)
    part = "attention" if s % 2 == 0 else "mlp"
    router = layer.get(f"{part}_router", {})
    sources = SOURCES[variant](s, e, v, p, size)
    weights.append([])
    inputs.append(
      read_inputs(config, router, sources, p[s], s % 2, weights[-1])
    )
    qk, value = (
      rms_norm(u, layer[f"{part}_norm"]["scale"], eps) for u in inputs[-1]
    )
    if s % 2 == 0:
      output = attention(
        config, layer["attention"], qk, value, segment_ids, positions
      )
    else:
      output = swiglu(layer["mlp"], qk)
    output = output + (probes or {}).get(s, 0)
    v.append(output)
    p.append(p[s] + output)

  final = p[-1]
  if variant in FINAL_READ:
    s = 2 * config.num_layers
    sources = SOURCES[variant](s, e, v, p, size)
    weights.append([])
    final, _ = read_inputs(
      config, params["final_router"], sources, p[-1], True, weights[-1]
    )
  hidden = rms_norm(final, params["final_norm"]["scale"], eps)
  tied = config.tie_embeddings
  return hidden @ (params["embedding"].T if tied else params["head"])


def read_inputs(config, router, sources, stream, is_mlp, weights):
  """The inputs (u for Q and K, u for V) of one read; one u twice for an MLP."""
  routing = config.routing
  if routing.null_source:
    null = np.broadcast_to(router["null_source"], stream.shape)
    sources = [null, *sources]
  if not sources:
    return stream, stream

  def mix(query):
    mixed, alpha_HxNxBxT = depth_mix(
      query, router["key_norm"], sources, routing.heads, config.norm_eps
    )
    weights.append(alpha_HxNxBxT)
    return mixed

  if routing.variant.startswith("embedding_skip"):
    mixes = sources * 2
  elif is_mlp or not routing.variant.startswith("rd_"):
    (query,) = router["query"]
    mixes = [mix(query)] * 2
  elif routing.variant == "rd_tied":
    (query,) = router["query"]
    mixes = [mix(query), mix(query)]
  elif routing.variant == "rd_frozen_v":
    (query,) = router["query"]
    mixes = [mix(query), mix(np.zeros_like(query))]
  else:
    w_qk, w_v = router["query"]
    mixes = [mix(w_qk), mix(w_v)]
    if routing.variant == "rd_average":
      mixes = [(mixes[0] + mixes[1]) / 2] * 2
  if routing.variant in REPLACING:
    return mixes
  reads = [stream + mix for mix in mixes]
  c = gate_value(routing, router)
  return [stream + c * (read - stream) for read in reads]


def gate_value(routing, router):
  if routing.gate == "sigmoid":
    return 1 / (1 + np.exp(-router["gate"]))
  if routing.gate == "scalar" or routing.variant == "embedding_skip_scaled":
    return router["gate"]
  return 1.0


def depth_mix(query, key_norm, sources, heads, eps):
  """sum_i alpha_i x_i, with its own alpha for every head; and the alphas."""
  width, size = sources[0].shape[-1], len(query)
  keys = [rms_norm(x[..., width - size :], key_norm, eps) for x in sources]
  alphas, outputs = [], []
  for h, query_h in enumerate(np.split(query, heads)):
    logits = [np.split(key, heads, -1)[h] @ query_h for key in keys]
    alpha = softmax(np.stack(logits), axis=0)
    values = [np.split(x, heads, -1)[h] for x in sources]
    alphas.append(alpha)
    outputs.append(
      sum(a[..., None] * x for a, x in zip(alpha, values, strict=True))
    )
  return np.concatenate(outputs, -1), np.stack(alphas)


def attention(config, params, qk, value_input, segment_ids, positions):
  """Grouped-query attention, one head at a time."""
  length = qk.shape[1]
  query = np.einsum("btd,dhc->bhtc", qk, params["query"]["kernel"])
  key = np.einsum("btd,dhc->bhtc", qk, params["key"]["kernel"])
  value = np.einsum("btd,dhc->bhtc", value_input, params["value"]["kernel"])
  if config.qk_norm:
    query = rms_norm(query, params["query_norm"]["scale"], config.norm_eps)
    key = rms_norm(key, params["key_norm"]["scale"], config.norm_eps)
  query = rotary(query, positions, config.rope_theta)
  key = rotary(key, positions, config.rope_theta)
  visible = segment_ids[:, :, None] == segment_ids[:, None, :]
  visible = visible & (np.arange(length)[:, None] >= np.arange(length))
  output = 0
  for h in range(config.num_heads):
    kv = h // (config.num_heads // config.num_kv_heads)
    logits = query[:, h] @ key[:, kv].swapaxes(1, 2) / config.head_dim**0.5
    weights = softmax(np.where(visible, logits, -np.inf), axis=-1)
    output = output + weights @ value[:, kv] @ params["output"]["kernel"][h]
  return output


def rotary(x_BxHxTxC, positions_BxT, theta):
  """Rotate-half, as in Hugging Face models."""
  size = x_BxHxTxC.shape[-1]
  frequencies = 1 / theta ** (np.arange(0, size, 2) / size)
  angles = np.tile(positions_BxT[:, None, :, None] * frequencies, 2)
  first, second = x_BxHxTxC[..., : size // 2], x_BxHxTxC[..., size // 2 :]
  rotated = np.concatenate([-second, first], -1)
  return x_BxHxTxC * np.cos(angles) + rotated * np.sin(angles)


def swiglu(params, x):
  gate, up = x @ params["gate"]["kernel"], x @ params["up"]["kernel"]
  return gate / (1 + np.exp(-gate)) * up @ params["down"]["kernel"]


def rms_norm(x, scale, eps):
  return scale * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def softmax(x, axis):
  weights = np.exp(x - x.max(axis, keepdims=True))
  return weights / weights.sum(axis, keepdims=True)


def _layer(tree, i):
  return {
    name: _layer(x, i) if isinstance(x, dict) else x[i]
    for name, x in tree.items()
  }

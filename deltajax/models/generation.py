"""Text from a model, token by token.

A `Generator` runs the prompts, which fills a cache of keys and values, then one
token at a time. Layers are called one by one, each with parameters of its own:
a scan would copy each layer's parameters out of their stack for every token,
and one program of all layers takes L times as long to compile. Lengths are
rounded up to those of `bucket`, and longer prompts are run in pieces, so that
few programs serve all and none needs [P, P] logits.

Shapes: B batch, P prompt, T tokens, S slots of the cache, V vocabulary, N stop
tokens.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from functools import partial
from typing import Any, NamedTuple

from flax import traverse_util
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from deltajax.config import ModelConfig
from deltajax.models.cache import LayerCache, Places
from deltajax.models.layers import Rotation
from deltajax.models.sampling import sample_token, Sampling
from deltajax.models.transformer import (
  DecoderLayer,
  is_routing,
  output_head,
  output_logits,
  partitionable,
  TransformerLM,
)
from deltajax.routing.memory import DepthState
from deltajax.routing.schedule import build_schedule, Step
from deltajax.routing.validation import ConfigError

SMALLEST_BUCKET = 16
PIECE = 512  # Tokens of a prompt that are run at once; a bucket.
AS_LIKELY = Sampling()


def generate(
  model: TransformerLM,
  params: Any,
  prompt_tokens: jax.typing.ArrayLike | Sequence[jax.typing.ArrayLike],
  *,
  max_new_tokens: int,
  temperature: float = 1.0,
  top_k: int | None = None,
  top_p: float | None = None,
  key: jax.Array | None = None,
  vocab_size: int | None = None,
  stop_tokens: Sequence[int] = (),
) -> np.ndarray:
  """Continues prompts; returns new tokens [B, max_new_tokens], int32.

  To generate more than once with the same parameters, or to see tokens as they
  come, keep a `Generator`.

  Args:
    model: the model.
    params: its unboxed parameters.
    prompt_tokens: [B, P], or B prompts of any lengths, at least one token each.
    max_new_tokens: how many tokens are added.
    temperature: as in `Sampling`, like the next two.
    top_k: see there.
    top_p: see there.
    key: random key; needed unless temperature is 0. Row i draws with
      `fold_in(key, i)`, whatever the other rows are.
    vocab_size: as in `Sampling`.
    stop_tokens: ids that end a row, which then repeats the one it drew.

  Raises:
    ConfigError: for options out of range, empty prompts, and prompts outside
      the vocabulary.

  Examples:
    >>> from deltajax import testing
    >>> config = testing.tiny_config(num_layers=1)
    >>> tokens = generate(
    ...   TransformerLM(config),
    ...   testing.random_params(config),
    ...   [[1, 2, 3], [4]],
    ...   max_new_tokens=2,
    ...   temperature=0,
    ... )
    >>> tokens.shape
    (2, 2)
  """
  sampling = Sampling(
    temperature=temperature, top_k=top_k, top_p=top_p, vocab_size=vocab_size
  )
  steps = Generator(model, params).steps(
    prompt_tokens,
    max_new_tokens=max_new_tokens,
    sampling=sampling,
    key=key,
    stop_tokens=stop_tokens,
  )
  tokens_xB = [np.asarray(token_B) for token_B in list(steps)]
  tokens_xB += tokens_xB[-1:] * (max_new_tokens - len(tokens_xB))
  return np.stack(tokens_xB, axis=1)


class Generator:
  """A model with its parameters laid out for generation.

  Everything is computed in plain XLA whatever the config says. Parameters may
  lie on a mesh, also of several hosts; all of these must then make the same
  calls.

  Holds a copy of the layers' parameters, in the dtype of the model, once it has
  run, and no longer those that it was given.

  Args:
    model: the model.
    params: its unboxed parameters.

  Raises:
    ConfigError: from `steps`, as `generate` does.

  Examples:
    >>> from deltajax import testing
    >>> config = testing.tiny_config(num_layers=1)
    >>> generator = Generator(
    ...   TransformerLM(config), testing.random_params(config)
    ... )
    >>> steps = generator.steps(
    ...   [[1, 2, 3]], max_new_tokens=2, sampling=Sampling(temperature=0)
    ... )
    >>> [token_B.shape for token_B in steps]
    [(1,), (1,)]
  """

  def __init__(self, model: TransformerLM, params: Any):
    """Takes a model and its unboxed parameters."""
    self.config = model.config
    leaf = jax.tree.leaves(params)[0]
    sharding = getattr(leaf, "sharding", None)
    whole = None
    if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1:
      whole = NamedSharding(sharding.mesh, PartitionSpec())
    self._plan = _Plan(partitionable(model.config), whole)
    self._params = params

  def steps(
    self,
    prompts: jax.typing.ArrayLike | Sequence[jax.typing.ArrayLike],
    *,
    max_new_tokens: int,
    sampling: Sampling = AS_LIKELY,
    key: jax.Array | None = None,
    stop_tokens: Sequence[int] = (),
  ) -> Iterator[jax.Array]:
    """Yields token_B, int32, until `max_new_tokens` or all rows have stopped.

    With no stop tokens nothing waits for a token before the next is computed;
    whoever looks at one does.

    Args:
      prompts: as for `generate`, like all others.
      max_new_tokens: see there.
      sampling: how tokens are drawn; as likely as they are, if not given.
      key: see there.
      stop_tokens: see there.

    Raises:
      ConfigError: as `generate`, before anything is computed.
    """
    rows = _checked_prompts(self.config, prompts)
    if max_new_tokens < 1:
      raise ConfigError(f"max_new_tokens is {max_new_tokens}; at least 1.")
    if key is None:
      if sampling.temperature > 0:
        raise ConfigError("sampling needs a key; temperature=0 does not.")
      key = jax.random.key(0)
    size = self.config.vocab_size
    if (sampling.vocab_size or size) > size:
      raise ConfigError(
        f"vocab_size is {sampling.vocab_size}; the model has {size} ids."
      )
    if not all(0 <= token < size for token in stop_tokens):
      raise ConfigError(
        f"stop_tokens are {list(stop_tokens)}; the model has ids 0 to"
        f" {size - 1}."
      )
    return self._steps(rows, max_new_tokens, sampling, key, stop_tokens)

  def _steps(self, rows, max_new_tokens, sampling, key, stop_tokens):
    longest = bucket(max(map(len, rows)))
    capacity = bucket(longest + max_new_tokens)
    first_B = np.array([longest - len(row) for row in rows], np.int32)
    prompts_BxP = np.stack(
      [np.pad(row, (longest - len(row), 0)) for row in rows]
    )
    stop_N = np.array(stop_tokens, np.int32)
    caches = _empty_caches(self._plan, len(rows), capacity)
    # Pieces of full length, behind a shorter first one.
    starts = [0, *range(longest % PIECE or PIECE, longest, PIECE)]
    for start, end in zip(starts, [*starts[1:], longest], strict=True):
      logits_BxV = self._extend(
        prompts_BxP[:, start:end], first_B, start, caches
      )
    drawn = _Drawn(np.zeros_like(first_B), np.zeros(len(rows), bool))
    for i in range(max_new_tokens):
      if i:
        logits_BxV = self._extend(
          drawn.token_B, first_B, longest + i - 1, caches
        )
      drawn = _draw(self._plan, sampling, logits_BxV, key, i, stop_N, drawn)
      yield drawn.token_B
      if len(stop_N) and bool(np.all(drawn.stopped_B)):
        return

  def _extend(self, tokens, first_B, slot, caches) -> jax.Array:
    """Runs T tokens, or one a row; returns logits_BxV after the last."""
    plan = self._plan
    around, layers = self._laid_out
    extent = caches[0].keys_ZxSxC.shape[1]
    if tokens.ndim == 2:  # What lies behind a prompt is empty.
      extent = min(extent, bucket(slot + tokens.shape[1]))
    state, context = _begin(
      plan, extent, around, tokens, first_B, np.int32(slot)
    )
    for i, (params, step) in enumerate(layers):
      state, caches[i] = _run_layer(
        plan, params, step, state, caches[i], context
      )
      if plan.whole is not None:
        # Hosts that run ahead of their collectives block each other, on CPUs.
        jax.block_until_ready(state)
    return _end(plan, around, state)

  @functools.cached_property
  def _laid_out(self) -> tuple[Any, list[tuple[Any, Step]]]:
    """Parameters around the layers, and of each layer with its schedule."""
    config = self.config
    around = {k: x for k, x in self._params.items() if k != "layers"}
    layers = _split_layers(self._plan, self._params["layers"])
    self._params = None
    steps = build_schedule(config.routing, config.num_layers).by_layer()
    return _cast(around, config), [
      (params, Step(*(jnp.asarray(x[i]) for x in steps)))
      for i, params in enumerate(layers)
    ]


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is static about all programs of a generator.

  Attributes:
    config: of the model.
    whole: the sharding of what lies whole on every device of a mesh, which is
      everything but parameters; None without a mesh.
  """

  config: ModelConfig
  whole: NamedSharding | None

  def place(self, tree: Any) -> Any:
    """Constrains results, so that the next call finds them where it wants."""
    if self.whole is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, self.whole)


class _Context(NamedTuple):
  """What every layer is told of the tokens, besides their stream."""

  rotation: Rotation
  places: Places


class _Drawn(NamedTuple):
  """The newest token of each row, and which rows have ended."""

  token_B: Any
  stopped_B: Any


@partial(jax.jit, static_argnums=(0, 1, 2))
def _empty_caches(plan, batch, capacity) -> list[LayerCache]:
  config = plan.config
  return plan.place(
    [
      LayerCache.create(config, batch, capacity)
      for _ in range(config.num_layers)
    ]
  )


@partial(jax.jit, static_argnums=(0, 1))
def _begin(plan, extent, params, tokens, first_B, slot):
  """The state before the first layer, and what all layers are told."""
  tokens_BxT = tokens.reshape(len(first_B), -1)
  places = Places.create(slot, first_B, tokens_BxT.shape[1], extent)
  embedded: Any = TransformerLM(plan.config).apply(
    {"params": params}, tokens_BxT, places.positions_BxT, method="embed"
  )
  state, rotation = embedded
  return plan.place((state, _Context(rotation, places)))


@partial(jax.jit, static_argnums=0, donate_argnums=(3, 4))
def _run_layer(plan, params, step, state, cache, context):
  config = plan.config
  rotation, places = context
  if places.positions_BxT.shape[1] == 1:
    # All slots of one token at once: a loop over them costs more.
    config = dataclasses.replace(config, depth_attention="reference")
  return plan.place(
    DecoderLayer(config).apply(
      {"params": params},
      state,
      step,
      rotation,
      None,
      (cache, places),
    )
  )


@partial(jax.jit, static_argnums=0)
def _end(plan, params, state: DepthState) -> jax.Array:
  """Logits_BxV of the last token."""
  last = jax.tree.map(lambda x: x[..., -1:, :], state)
  hidden_Bx1xD: Any = TransformerLM(plan.config).apply(
    {"params": params}, last, method="read_out"
  )
  head_DxV = output_head(plan.config, params)
  return plan.place(output_logits(hidden_Bx1xD[:, 0], head_DxV))


@partial(jax.jit, static_argnums=(0, 1))
def _draw(plan, sampling, logits_BxV, key, step, stop_N, last) -> _Drawn:
  """Draws a token for every row that has not stopped; others repeat theirs."""
  rows_B = jnp.arange(len(logits_BxV))
  keys_B = jax.vmap(
    lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step)
  )(rows_B)
  token_B = sample_token(logits_BxV, keys_B, sampling)
  token_B = jnp.where(last.stopped_B, last.token_B, token_B)
  stopped_B = last.stopped_B | jnp.isin(token_B, stop_N)
  return plan.place(_Drawn(token_B, stopped_B))


@partial(jax.jit, static_argnums=0)
def _split_layers(plan, stacked) -> list[Any]:
  """Parameters of each layer, in the dtype that the layer computes in."""
  cast = _cast(stacked, plan.config)
  return [
    jax.tree.map(lambda x, i=i: x[i], cast)
    for i in range(plan.config.num_layers)
  ]


def _cast(params: Any, config: ModelConfig) -> Any:
  """Casts what the model would cast at every call: all but the routers'."""
  flat = traverse_util.flatten_dict(params)
  return traverse_util.unflatten_dict(
    {
      path: jnp.asarray(x, None if is_routing(path) else config.dtype)
      for path, x in flat.items()
    }
  )


def _checked_prompts(config: ModelConfig, prompts: Any) -> list[np.ndarray]:
  rows = [np.asarray(row) for row in prompts]
  for i, row in enumerate(rows):
    if row.ndim != 1 or not len(row):
      raise ConfigError(
        f"prompt {i} has shape {row.shape}; give [B, P], or a list of 1-D"
        " prompts, with at least one token each."
      )
    if not np.issubdtype(row.dtype, np.integer):
      raise ConfigError(f"prompt {i} has dtype {row.dtype}; give token ids.")
  if not rows:
    raise ConfigError("there is no prompt; give at least one.")
  least, most = min(map(np.min, rows)), max(map(np.max, rows))
  if least < 0 or most >= config.vocab_size:
    raise ConfigError(
      f"prompt ids run from {least} to {most}; the model has ids 0 to"
      f" {config.vocab_size - 1}."
    )
  return [row.astype(np.int32) for row in rows]


def bucket(size: int) -> int:
  """The size that is compiled for `size`: a quarter more at most, or 15.

  Multiples of 16 up to 128, then four sizes for each power of two.
  """
  power = 1 << (size - 1).bit_length()
  step = max(SMALLEST_BUCKET, power // 8)
  return -(-size // step) * step

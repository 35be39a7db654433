"""The decoder: one scanned layer for every routing variant.

Shapes: B batch, T sequence, D width, V vocabulary, P rotary pairs, U roles.
"""

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

from flax import linen as nn, traverse_util
import flax.struct
import jax
import jax.numpy as jnp

from deltajax.config import ModelConfig
from deltajax.models.cache import LayerCache, Places
from deltajax.models.layers import (
  Attention,
  RMSNorm,
  Rotation,
  SwiGLU,
)
from deltajax.routing.depth_scan import (
  depth_scan,
  LayerParams,
  REMAT_POLICIES,
  ScannedLayer,
)
from deltajax.routing.memory import DepthState
from deltajax.routing.router import (
  CAPTURE,
  DepthRouter,
  read_together,
  StoredRead,
)
from deltajax.routing.schedule import build_schedule, Step
from deltajax.routing.sharding import constrain
from deltajax.routing.streaming import wide_dtype
from deltajax.routing.validation import ConfigError
from deltajax.routing.variants import Roles


@flax.struct.dataclass
class ModelOutput:
  """What a forward pass returns.

  Attributes:
    logits_BxTxV: float32 (float64 for float64 models).
    hidden_BxTxD: the normed input of the output head, in the dtype of the
      model.

  Examples:
    >>> from deltajax import testing
    >>> config = testing.tiny_config()
    >>> output = jax.eval_shape(
    ...   TransformerLM(config).apply,
    ...   {"params": testing.random_params(config)},
    ...   testing.random_tokens(config, batch=2, length=5),
    ... )
    >>> output.logits_BxTxV.shape, output.hidden_BxTxD.shape
    ((2, 5, 320), (2, 5, 16))
  """

  logits_BxTxV: jax.Array
  hidden_BxTxD: jax.Array


# Collection into which sublayers put what they read and put out, where it is
# mutable.
OBSERVED = "observed"
# Collection of arrays that are added to what sublayers put out, where it is
# given: zeros, of which somebody wants the gradient.
PROBES = "probes"


def _router(config: ModelConfig, roles: Roles):
  return DepthRouter(
    config.routing,
    roles,
    config.width,
    config.norm_eps,
    config.depth_attention,
    config.param_dtype,
  )


def _norm(config: ModelConfig) -> RMSNorm:
  return RMSNorm(config.norm_eps, param_dtype=config.param_dtype)


class DecoderLayer(nn.Module):
  """An attention and an MLP sublayer, each reading over depth.

  Attributes:
    config: of the model.
  """

  config: ModelConfig

  def setup(self) -> None:
    """Declares the parts."""
    config, row = self.config, self.config.routing.row
    self.attention_router = _router(config, row.roles)
    self.attention_norm = _norm(config)
    self.attention = Attention(config)
    self.mlp_router = _router(config, row.single_role)
    self.mlp_norm = _norm(config)
    self.mlp = SwiGLU(config)

  def __call__(
    self,
    state: DepthState,
    steps: Step,
    rotation: Rotation,
    segment_ids_BxT: jax.Array | None,
    cached: tuple[LayerCache, Places] | None = None,
  ) -> tuple[DepthState, LayerCache | None]:
    """Returns the state after both sublayers, and the cache if there is one.

    Args:
      state: the depth state before the layer.
      steps: the two rows of the schedule, arrays [2].
      rotation: of the rotary embedding.
      segment_ids_BxT: of packed documents, or None.
      cached: as for `Attention`.
    """
    both = [Step(*(x[i] for x in steps)) for i in (0, 1)]
    routers = [self.attention_router, self.mlp_router]
    reads, state = read_together(routers, state, both)
    state, cache = self.sublayers(
      state, both, reads, rotation, segment_ids_BxT, cached
    )
    appends = self.config.routing.row.appends
    return state.commit(both, appends), cache

  def queries(self) -> tuple[jax.Array, jax.Array]:
    """Queries_RxK of both routers, for reads that layers make together."""
    return self.attention_router.queries(), self.mlp_router.queries()

  def sublayers(
    self,
    state: DepthState,
    steps: Sequence[Step],
    reads: Sequence[StoredRead],
    rotation: Rotation,
    segment_ids_BxT: jax.Array | None,
    cached: tuple[LayerCache, Places] | None = None,
  ) -> tuple[DepthState, LayerCache | None]:
    """The layer with its reads of the memory given, and nothing stored.

    Args:
      state: the depth state before the layer.
      steps: the two rows of the schedule.
      reads: of the two routers.
      rotation: as in `__call__`.
      segment_ids_BxT: as in `__call__`.
      cached: as for `Attention`.
    """
    state, cache = self.attention_sublayer(
      state, steps[0], reads[0], rotation, segment_ids_BxT, cached
    )
    return self.mlp_sublayer(state, steps[1], reads[1]), cache

  def attention_sublayer(
    self,
    state: DepthState,
    step: Step,
    read: StoredRead,
    rotation: Rotation,
    segment_ids_BxT: jax.Array | None,
    cached: tuple[LayerCache, Places] | None = None,
  ) -> tuple[DepthState, LayerCache | None]:
    """The first half of `sublayers`."""
    inputs_UxBxTxD = self.attention_router(state, step, read)
    output_BxTxD, cache = self.attention(
      self.attention_norm(inputs_UxBxTxD), rotation, segment_ids_BxT, cached
    )
    output_BxTxD = self._observed("attention", inputs_UxBxTxD, output_BxTxD)
    appends = self.config.routing.row.attention_appends
    return state.advance(output_BxTxD, step, appends), cache

  def mlp_sublayer(
    self, state: DepthState, step: Step, read: StoredRead
  ) -> DepthState:
    """The second half of `sublayers`."""
    inputs_UxBxTxD = self.mlp_router(state, step, read)
    output_BxTxD = self.mlp(self.mlp_norm(inputs_UxBxTxD[0]))
    output_BxTxD = self._observed("mlp", inputs_UxBxTxD, output_BxTxD)
    return state.advance(output_BxTxD, step, self.config.routing.row.appends)

  def _observed(
    self, name: str, inputs_UxBxTxD: jax.Array, output_BxTxD: jax.Array
  ) -> jax.Array:
    """The output of a sublayer, with its probe.

    Into `OBSERVED` go `{name}_output`, and `{name}_input_rms` of each role and
    token.
    """
    if self.has_variable(PROBES, name):
      output_BxTxD += self.get_variable(PROBES, name)
    if self.is_mutable_collection(OBSERVED) and not self.is_initializing():
      wide_UxBxTxD = inputs_UxBxTxD.astype(wide_dtype(inputs_UxBxTxD))
      square_UxBxT = jnp.mean(jnp.square(wide_UxBxTxD), axis=-1)
      found = {
        f"{name}_input_rms": jnp.sqrt(square_UxBxT),
        f"{name}_output": output_BxTxD,
      }
      for key, x in found.items():
        self.sow(OBSERVED, key, x, reduce_fn=lambda _, new: new)
    return output_BxTxD


class TransformerLM(nn.Module):
  """A decoder-only language model whose residuals are routed over depth.

  Parameters are float32 with logical axis names; layers are stacked on axis 0
  (logical axis `layers`). The same key gives the same values to every
  parameter that two variants share.

  Attributes:
    config: the architecture, routing included.

  References:
    Qwen3, arXiv 2505.09388; Llama 3, arXiv 2407.21783: the layers. Those of the
    routing are with `deltajax.routing.variants`.

  Examples:
    >>> from deltajax import testing
    >>> model = TransformerLM(testing.tiny_config("delta", num_layers=1))
    >>> tokens_BxT = testing.random_tokens(model.config, batch=1, length=3)
    >>> variables = jax.jit(model.init)(jax.random.key(0), tokens_BxT)
    >>> output = jax.jit(model.apply)(variables, tokens_BxT)
    >>> output.logits_BxTxV.shape
    (1, 3, 320)
    >>> params = nn.meta.unbox(variables)["params"]  # Without names of axes.
  """

  config: ModelConfig

  def setup(self) -> None:
    """Declares the parameters."""
    config = self.config
    self.schedule = build_schedule(config.routing, config.num_layers)
    self.embedding = self._matrix("embedding", ("vocab", "embed"))
    if not config.tie_embeddings:
      self.head = self._matrix("head", ("embed", "vocab"))
    layer: Any = DecoderLayer
    layer = nn.remat(
      layer, prevent_cse=False, policy=REMAT_POLICIES[config.remat]
    )
    self.layers = nn.scan(
      layer,
      variable_axes=dict.fromkeys(("params", CAPTURE, OBSERVED, PROBES), 0),
      split_rngs={"params": True},
      in_axes=(0, nn.broadcast, nn.broadcast),
      length=config.num_layers,
      metadata_params={nn.PARTITION_NAME: "layers"},
    )(config)
    if self.schedule.final is not None:
      self.final_router = _router(config, config.routing.row.single_role)
    self.final_norm = _norm(config)

  def __call__(
    self,
    tokens_BxT: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
  ) -> ModelOutput:
    """Runs the model.

    Args:
      tokens_BxT: token ids.
      segment_ids: segment_ids_BxT of packed documents, which do not see each
        other. None: one document a row.
      positions: positions_BxT within documents. None: 0 .. T-1.

    Raises:
      ConfigError: for shapes that disagree, and token ids outside of the
        vocabulary (checked where the values are known, not under jit).
    """
    hidden_BxTxD = self.hidden(
      tokens_BxT, segment_ids=segment_ids, positions=positions
    )
    head_DxV = self.embedding.T if self.config.tie_embeddings else self.head
    logits_BxTxV = output_logits(hidden_BxTxD, head_DxV)
    return ModelOutput(logits_BxTxV=logits_BxTxV, hidden_BxTxD=hidden_BxTxD)

  def hidden(
    self,
    tokens_BxT: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
  ) -> jax.Array:
    """As `__call__`, up to the output head; returns hidden_BxTxD."""
    self._check(tokens_BxT, segment_ids, positions)
    if positions is None:
      positions = jnp.broadcast_to(
        jnp.arange(tokens_BxT.shape[1]), tokens_BxT.shape
      )
    state, rotation = self.embed(tokens_BxT, positions)
    state = self.run_layers(state, (rotation, segment_ids))
    return self.read_out(state)

  def embed(
    self, tokens_BxT: jax.Array, positions_BxT: jax.Array
  ) -> tuple[DepthState, Rotation]:
    """What the first layer is given."""
    config = self.config
    # Rows are looked up whole: width is gathered first, as for any kernel.
    embedding_VxD = constrain(
      self.embedding.astype(config.dtype), "vocab", "features"
    )
    embedded_BxTxD = constrain(
      embedding_VxD[tokens_BxT], "batch", "sequence", "features"
    )
    state = DepthState.create(embedded_BxTxD, self.schedule)
    return state, Rotation.create(positions_BxT, config)

  def read_out(self, state: DepthState) -> jax.Array:
    """The input of the output head, hidden_BxTxD, after the last layer."""
    final_BxTxD = state.stream_BxTxD
    if self.schedule.final is not None:
      final_BxTxD = self.final_router(state, self.schedule.final)[0]
    return self.final_norm(final_BxTxD)

  def run_layers(self, state: DepthState, consts: Any) -> DepthState:
    """The state after the last layer.

    The plain scan declares parameters and is observed; else `depth_scan`.

    Args:
      state: that `embed` gave.
      consts: (rotation that `embed` gave, segment_ids_BxT or None).
    """
    config = self.config
    if (
      config.scan == "plain"
      or self.is_initializing()
      or any(self.is_mutable_collection(x) for x in (CAPTURE, OBSERVED))
    ):
      steps = jax.tree.map(jnp.asarray, self.schedule.by_layer())
      return self.layers(state, steps, *consts)[0]

    layer = DecoderLayer(config, parent=None)
    variables = nn.meta.unbox(self.layers.variables)

    def pick(routers, prefix):
      return {
        collection: {
          name: value
          for name, value in values.items()
          if name.startswith(prefix) and is_routing((name,)) == routers
        }
        for collection, values in variables.items()
      }

    def join(*parts):
      return {
        collection: {
          name: value
          for part in parts
          for name, value in part[collection].items()
        }
        for collection in parts[0]
      }

    def queries(routers):
      return layer.apply(join(*routers), method="queries")

    def attention(router, rest, state, step, read, consts):
      return layer.apply(
        join(router, rest),
        state,
        step,
        read,
        *consts,
        method="attention_sublayer",
      )[0]

    def mlp(router, rest, state, step, read, consts):
      del consts
      return layer.apply(
        join(router, rest), state, step, read, method="mlp_sublayer"
      )

    return depth_scan(
      ScannedLayer(
        queries=queries,
        sublayers=(attention, mlp),
        routing=config.routing,
        eps=config.norm_eps,
        implementation=config.depth_attention,
      ),
      LayerParams(
        routers=(pick(True, "attention"), pick(True, "mlp")),
        others=(pick(False, "attention"), pick(False, "mlp")),
      ),
      state,
      self.schedule,
      consts,
      remat=config.remat,
      group=config.read_group,
    )

  def _matrix(self, name: str, axes: tuple[str, str]) -> jax.Array:
    config = self.config
    sizes = {"vocab": config.vocab_size, "embed": config.width}
    matrix: Any = self.param(
      name,
      nn.with_logical_partitioning(
        nn.initializers.normal(config.init_std), axes
      ),
      tuple(sizes[axis] for axis in axes),
      jnp.dtype(config.param_dtype),
    )
    return matrix

  def _check(self, tokens_BxT, segment_ids, positions) -> None:
    if tokens_BxT.ndim != 2:
      raise ConfigError(
        f"tokens have shape {tokens_BxT.shape}; the model takes [B, T]."
      )
    for name, x in (("segment_ids", segment_ids), ("positions", positions)):
      if x is not None and x.shape != tokens_BxT.shape:
        raise ConfigError(
          f"{name} have shape {x.shape}, tokens {tokens_BxT.shape}; they must"
          " be equal."
        )
    if isinstance(tokens_BxT, jax.core.Tracer) or not tokens_BxT.size:
      return
    least, most = int(tokens_BxT.min()), int(tokens_BxT.max())
    if least < 0 or most >= self.config.vocab_size:
      raise ConfigError(
        f"token ids run from {least} to {most}; the vocabulary has ids 0 to"
        f" {self.config.vocab_size - 1}."
      )


def partitionable(config: ModelConfig) -> ModelConfig:
  """The config with plain XLA throughout: any length, any platform.

  Kernels run on the mesh that they are traced for. What reads a model beside
  its training (samples, reports) has parameters on a mesh and no such trace;
  the compiler then partitions, which it can do for its own operations alone.
  """
  return dataclasses.replace(config, attention="xla", depth_attention="xla")


def is_routing(path: Sequence[str]) -> bool:
  """Whether a parameter belongs to routing over depth, not to the base."""
  return any(name.endswith("_router") for name in path)


def split_routing(params: Mapping[str, Any]) -> tuple[Any, Any]:
  """Parameters of the base, and those that route over depth, as two trees."""
  flat = traverse_util.flatten_dict(params)
  routing = {path: x for path, x in flat.items() if is_routing(path)}
  base = {path: x for path, x in flat.items() if path not in routing}
  unflatten = traverse_util.unflatten_dict
  return unflatten(base), unflatten(routing)


def join_routing(base: Mapping[str, Any], routing: Mapping[str, Any]) -> Any:
  """The parameters of which `split_routing` makes these two trees."""
  flat = traverse_util.flatten_dict(base) | traverse_util.flatten_dict(routing)
  return traverse_util.unflatten_dict(flat)


def output_logits(hidden: jax.Array, head_DxV: jax.Array) -> jax.Array:
  """Logits in float32 (or wider) from hidden states in the compute dtype."""
  return jnp.einsum(
    "...d,dv->...v",
    hidden,
    head_DxV.astype(hidden.dtype),
    preferred_element_type=jnp.promote_types(hidden.dtype, jnp.float32),
  )


def output_head(config: ModelConfig, params: Any) -> jax.Array:
  """The matrix head_DxV of unboxed parameters, tied or not."""
  return params["embedding"].T if config.tie_embeddings else params["head"]

"""All options of the project, as frozen and validated dataclasses.

`RoutingConfig` lives with the routing library (`deltajax.routing.variants`)
and is part of `ModelConfig`.
"""

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
import typing
from typing import Any, TypeVar

from deltajax.routing.depth_attention import READERS
from deltajax.routing.schedule import build_schedule, check_group
from deltajax.routing.validation import (
  check_name,
  ConfigError as ConfigError,
  typed_config,
)
from deltajax.routing.variants import RoutingConfig

T = TypeVar("T")

DTYPES = ("bfloat16", "float16", "float32", "float64")
ROPE_SCALINGS = ("none", "llama3")
REMAT = ("none", "dots", "full")
SCANS = ("append_only", "plain")
ATTENTION = ("xla", "splash", "cudnn", "splash_interpret")
FREEZE = ("none", "base")


def _check_positive(config: Any, where: str, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if value <= 0:
      raise ConfigError(f"{where}.{name} is {value}; it must be positive.")


def _check_not_negative(config: Any, where: str, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    if value < 0:
      raise ConfigError(f"{where}.{name} is {value}; it must not be negative.")


@typed_config
class RopeScaling:
  """How rotary frequencies are lowered for contexts beyond pretraining's.

  Attributes:
    kind: `none`, or `llama3`: wavelengths above `original_length /
      low_freq_factor` positions are multiplied by `factor`, those below
      `original_length / high_freq_factor` stay, and between the two the
      frequency is interpolated (Llama 3.1, arXiv 2407.21783).
    factor: see above; the fields have meaning for `llama3` alone.
    low_freq_factor: see above.
    high_freq_factor: see above.
    original_length: context length of pretraining.

  Raises:
    ConfigError: for an unknown kind, values out of range, and values of
      `llama3` with `none`.

  Examples:
    >>> RopeScaling(kind="llama3", factor=32.0).original_length
    8192
  """

  kind: str = "none"
  factor: float = 8.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192

  def __post_init__(self) -> None:
    where = "model.rope_scaling"
    check_name(f"{where}.kind", self.kind, ROPE_SCALINGS)
    _check_positive(self, where, "factor", "low_freq_factor", "original_length")
    if self.high_freq_factor <= self.low_freq_factor:
      raise ConfigError(
        f"{where}.high_freq_factor is {self.high_freq_factor}; it must be above"
        f" low_freq_factor {self.low_freq_factor}."
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if self.kind == "none" and value != field.default:
        raise ConfigError(
          f"{where}.{field.name} is {value}, but {where}.kind 'none' scales"
          " nothing; set kind 'llama3'."
        )


@typed_config
class ModelConfig:
  """A decoder-only transformer of the Qwen3 or Llama family.

  Attributes:
    vocab_size: rows of the embedding.
    width: D, size of the residual stream.
    num_layers: transformer layers, each an attention and an MLP sublayer.
    num_heads: query heads.
    num_kv_heads: key and value heads; divides num_heads.
    head_dim: channels of a head; need not be width / num_heads.
    mlp_width: hidden size of the SwiGLU MLP.
    rope_theta: base of the rotary frequencies.
    rope_scaling: of these frequencies.
    norm_eps: of every RMSNorm, depth-attention key norms included. 0 is for
      checks of forward passes: norms of zero vectors then have no gradient.
    tie_embeddings: the output head is the embedding.
    qk_norm: RMSNorm on queries and keys of each head (Qwen3).
    attention_bias: the maps to queries, keys, values and output have biases.
    mlp_bias: the maps of the MLP have biases.
    routing: how residuals are routed over depth.
    dtype: of activations and matrix products: `bfloat16`, `float16`, `float32`
      or `float64`.
    param_dtype: of parameters.
    remat: what the backward pass computes again: `none`, `dots` or `full`; see
      `deltajax.routing.depth_scan`.
    scan: `append_only` keeps one copy of the depth memory for the gradient;
      `plain` keeps one for each layer, with the same values and gradients.
    read_group: layers that read the depth memory in one pass; divides
      num_layers, and is 1 unless every sublayer leaves a source. More move
      fewer bytes and need more memory. The plain scan reads layer by layer.
    init_std: standard deviation of kernels and embedding at initialisation.
    depth_attention: implementation of the depth attention (`xla`, `pallas_tpu`,
      `pallas_triton`, for tests `interpret`, `interpret_triton` and
      `reference`), which serves every call or raises; None for the first that
      supports the case on the platform. See `deltajax.routing.depth_attention`.
    attention: implementation of the attention over tokens (`xla`, `splash`,
      `cudnn`), which serves every call or raises; None for the first of them
      that supports the case (its shapes, its dtype, the mesh) on the
      platform. See `deltajax.models.attention`.

  Raises:
    ConfigError: for unknown fields and names, values out of range, and sizes
      that do not go together.

  Examples:
    >>> config = ModelConfig(
    ...   vocab_size=256,
    ...   width=64,
    ...   num_layers=4,
    ...   num_heads=4,
    ...   num_kv_heads=2,
    ...   head_dim=16,
    ...   mlp_width=160,
    ...   routing=RoutingConfig(variant="delta_block", num_blocks=2),
    ... )
    >>> config.dtype, config.param_dtype
    ('bfloat16', 'float32')
  """

  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling = RopeScaling()
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  qk_norm: bool = True
  attention_bias: bool = False
  mlp_bias: bool = False
  routing: RoutingConfig = RoutingConfig()
  dtype: str = "bfloat16"
  param_dtype: str = "float32"
  remat: str = "none"
  scan: str = "append_only"
  read_group: int = 1
  init_std: float = 0.02
  depth_attention: str | None = None
  attention: str | None = None

  def __post_init__(self) -> None:
    _check_positive(
      self,
      "model",
      *("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads"),
      *("head_dim", "mlp_width", "rope_theta", "init_std"),
    )
    _check_not_negative(self, "model", "norm_eps")
    check_name("model.dtype", self.dtype, DTYPES)
    check_name("model.param_dtype", self.param_dtype, DTYPES)
    check_name("model.remat", self.remat, REMAT)
    check_name("model.scan", self.scan, SCANS)
    if self.attention is not None:
      check_name("model.attention", self.attention, ATTENTION)
    if self.depth_attention is not None:
      check_name("model.depth_attention", self.depth_attention, READERS)
    if self.num_heads % self.num_kv_heads:
      raise ConfigError(
        f"model.num_heads {self.num_heads} is not divisible by"
        f" model.num_kv_heads {self.num_kv_heads}."
      )
    if self.head_dim % 2:
      raise ConfigError(
        f"model.head_dim is {self.head_dim}; rotary embeddings need an even"
        " number of channels."
      )
    self.routing.check_width(self.width)
    build_schedule(self.routing, self.num_layers)
    check_group(self.routing, self.num_layers, self.read_group)


@typed_config
class DataConfig:
  """What a run reads.

  Attributes:
    dataset: `python_stdlib`, or a path (with a "/"): of a data set that
      `train.prepare_data` has packed, of files of text (.txt, .jsonl, .parquet)
      or their directory, or of a TFDS data set of texts.
    mixture: more data sets, to be read together with it.
    weights: share of the rows of `dataset` and of each of `mixture`; they sum
      to 1. Empty: in proportion to the rows that each has.
    data_dir: where data sets that are built here are kept, and the packed rows
      of any: made once by the first host, read one by one by all.
    tokenizer: `bytes`, or the path (with a "/") of a tokenizer.json or of the
      directory that holds it.
    sequence_length: T, tokens that a model sees at once; rows hold T + 1.
  """

  dataset: str = "python_stdlib"
  mixture: tuple[str, ...] = ()
  weights: tuple[float, ...] = ()
  data_dir: str = "data"
  tokenizer: str = "bytes"
  sequence_length: int = 256

  def __post_init__(self) -> None:
    _check_positive(self, "data", "sequence_length")
    if not self.weights:
      return
    if len(self.weights) != len(self.datasets):
      raise ConfigError(
        f"data.weights has {len(self.weights)} numbers; data.dataset and"
        f" data.mixture name {len(self.datasets)} data sets."
      )
    if min(self.weights) <= 0 or abs(sum(self.weights) - 1) > 1e-6:
      raise ConfigError(
        f"data.weights are {self.weights}, which sum to"
        f" {sum(self.weights):g}; they must be positive and sum to 1."
      )

  @property
  def datasets(self) -> tuple[str, ...]:
    """All that are read together."""
    return (self.dataset, *self.mixture)


@typed_config
class OptimizerConfig:
  """AdamW with warm-up, cosine decay and clipping.

  Attributes:
    learning_rate: at the end of the warm-up.
    routing_learning_rate: the same of the parameters that route over depth,
      which follow the schedule in proportion; None: learning_rate.
    final_learning_rate: at the last step of the cosine.
    warmup_steps: steps of the linear warm-up from 0.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: of kernels and the embedding. Norms, queries, gates and null
      sources are never decayed.
    clip_norm: largest global norm of a gradient.
    query_multiplier: learning rate of routing queries, relative to that of
      the other routing parameters.
  """

  learning_rate: float = 6e-4
  routing_learning_rate: float | None = None
  final_learning_rate: float = 6e-5
  warmup_steps: int = 1000
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  query_multiplier: float = 1.0

  def __post_init__(self) -> None:
    _check_positive(self, "optimizer", "learning_rate", "eps", "clip_norm")
    if self.routing_learning_rate is not None:
      _check_positive(self, "optimizer", "routing_learning_rate")
    _check_not_negative(
      self,
      "optimizer",
      *("final_learning_rate", "warmup_steps", "weight_decay"),
      "query_multiplier",
    )
    for name in ("b1", "b2"):
      value = getattr(self, name)
      if not 0 <= value < 1:
        raise ConfigError(f"optimizer.{name} is {value}; it must be in [0, 1).")


@typed_config
class MeshConfig:
  """Sizes of the mesh of devices; one of them may be -1: what is left.

  Attributes:
    data: copies of the model, each with its share of the batch; the axis that
      is split over slices of a multi-slice run.
    fsdp: shards of parameters and optimizer state, and of the batch.
    tensor: shards of heads, mlp and vocabulary.
    context: shards of the sequence.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  context: int = 1

  def __post_init__(self) -> None:
    sizes = dataclasses.asdict(self)
    for name, size in sizes.items():
      if size < 1 and size != -1:
        raise ConfigError(
          f"mesh.{name} is {size}; it must be positive, or -1 for what is left."
        )
    unknown = [name for name, size in sizes.items() if size == -1]
    if len(unknown) > 1:
      raise ConfigError(
        f"mesh sizes {' and '.join(unknown)} are -1; only one can be."
      )


@typed_config
class HostsConfig:
  """How the hosts of a run find each other.

  Attributes:
    cluster: `auto` starts the distributed runtime where the environment says
      that there are several hosts (TPU pod, Slurm, JAX_COORDINATOR_ADDRESS);
      `none` never does; `explicit` uses the fields below.
    coordinator: `address:port` of host 0.
    count: hosts of the run.
    index: this host, from 0.
  """

  cluster: str = "auto"
  coordinator: str | None = None
  count: int | None = None
  index: int | None = None

  def __post_init__(self) -> None:
    check_name("hosts.cluster", self.cluster, ("auto", "none", "explicit"))
    fields = {
      "coordinator": self.coordinator,
      "count": self.count,
      "index": self.index,
    }
    given = [name for name, value in fields.items() if value is not None]
    if self.cluster != "explicit":
      if given:
        raise ConfigError(
          f"hosts.{given[0]} is for hosts.cluster 'explicit', not"
          f" {self.cluster!r}."
        )
      return
    missing = sorted(set(fields) - set(given))
    if missing:
      raise ConfigError(
        f"hosts.cluster 'explicit' needs hosts.{', hosts.'.join(missing)} too."
      )
    assert self.count is not None
    assert self.index is not None
    if not 0 <= self.index < self.count:
      raise ConfigError(
        f"hosts.index is {self.index}; of {self.count} hosts it must be 0 to"
        f" {self.count - 1}."
      )


@typed_config
class TrainingConfig:
  """Length, batch and bookkeeping of a run.

  Attributes:
    steps: updates of the whole run; the cosine ends here.
    stop_after: stop (with a checkpoint) once this many updates are done in
      all, to be resumed by the same command later. None: run to the end.
    batch_size: sequences per update.
    accumulation: micro-batches per update; divides batch_size.
    seed: of parameters and data order.
    z_loss: weight of the squared log-normaliser.
    log_every: updates between lines of metrics.
    eval_every: updates between validations.
    eval_sequences: rows of the fixed validation set.
    eval_routing: each validation also says how sharply the model routes, on its
      first rows, one on each shard of the batch. It holds what all sublayers
      put out for them.
    checkpoint_every: updates between checkpoints.
    accept: fields (`training.seed`), sections (`data`) or `data.content` in
      which a run that is resumed may differ from what it was. Batch k is then
      that of the new order, whatever was read before.
    keep_checkpoints: how many of the newest checkpoints are kept.
    keep_every: keep those at multiples of this number of updates, too.
    wandb_project: metrics also go to this project of Weights & Biases; where
      WANDB_MODE is `offline`, to files for a later upload.
    keep_best: how many of those with the least validation loss are kept, too;
      each checkpoint then comes with a validation.
  """

  steps: int = 10_000
  stop_after: int | None = None
  batch_size: int = 64
  accumulation: int = 1
  seed: int = 0
  z_loss: float = 0.0
  log_every: int = 10
  eval_every: int = 500
  eval_sequences: int = 256
  eval_routing: bool = True
  checkpoint_every: int = 500
  accept: tuple[str, ...] = ()
  keep_checkpoints: int = 3
  keep_every: int | None = None
  keep_best: int = 0
  wandb_project: str | None = None

  def __post_init__(self) -> None:
    _check_positive(
      self,
      "training",
      *("steps", "batch_size", "accumulation", "log_every", "eval_every"),
      *("eval_sequences", "checkpoint_every", "keep_checkpoints"),
    )
    _check_not_negative(self, "training", "z_loss", "keep_best")
    if self.keep_every is not None:
      _check_positive(self, "training", "keep_every")
    if self.stop_after is not None:
      _check_positive(self, "training", "stop_after")
    if self.batch_size % self.accumulation:
      raise ConfigError(
        f"training.batch_size {self.batch_size} is not divisible by"
        f" training.accumulation {self.accumulation}."
      )


@typed_config
class HealthConfig:
  """What a run does when something goes wrong.

  Attributes:
    skip_limit: updates in a row that may be skipped because their loss or
      gradient is not finite, or their loss is a spike; one more stops the run.
    spike: standard deviations above the running mean of about 100 losses from
      which a loss is a spike; None: none is.
    hang_seconds: after which a start, an update, a validation, a test, a
      routing summary, a checkpoint or a report that does not end is reported,
      with the stacks of all threads; None: never. The first of each kind,
      which compiles, has 20 minutes more.
    hang_exits: end the process then, with exit code 4.
  """

  skip_limit: int = 3
  spike: float | None = None
  hang_seconds: float | None = 1800.0
  hang_exits: bool = False

  def __post_init__(self) -> None:
    _check_not_negative(self, "health", "skip_limit")
    for name in ("spike", "hang_seconds"):
      if getattr(self, name) is not None:
        _check_positive(self, "health", name)


@typed_config
class RunConfig:
  """Everything that defines a run.

  Attributes:
    model: the architecture.
    data: what it reads.
    optimizer: how it learns.
    training: for how long, and what is written down.
    health: what it does when something goes wrong.
    mesh: of devices.
    hosts: how several hosts find each other.
    init_from: a model directory, a run, or one of its checkpoints, whose
      parameters the run starts with; None: they are drawn from the seed.
    freeze: `base` leaves all parameters as they are but those that route over
      depth, which alone have gradients and moments; `none` learns all.
  """

  model: ModelConfig
  data: DataConfig = DataConfig()
  optimizer: OptimizerConfig = OptimizerConfig()
  training: TrainingConfig = TrainingConfig()
  health: HealthConfig = HealthConfig()
  mesh: MeshConfig = MeshConfig()
  hosts: HostsConfig = HostsConfig()
  init_from: str | None = None
  freeze: str = "none"

  def __post_init__(self) -> None:
    check_name("freeze", self.freeze, FREEZE)
    routing = self.model.routing
    learns_routing = routing.row.learned or routing.gate_function is not None
    if self.freeze == "base" and not learns_routing:
      raise ConfigError(
        f"freeze is 'base', but variant {routing.variant!r} has no parameters"
        " that route over depth, so that nothing would learn."
      )
    _check_accept(self.training.accept)
    if self.model.param_dtype not in ("float32", "float64"):
      raise ConfigError(
        f"model.param_dtype is {self.model.param_dtype}; small updates would"
        " be rounded away. Train with float32 parameters, and model.dtype"
        " bfloat16 for speed."
      )
    if self.model.dtype == "float16":
      raise ConfigError(
        "model.dtype is float16; its gradients underflow without loss scaling,"
        " which is not here. Train with bfloat16 or float32."
      )
    stop_after = self.training.stop_after
    if stop_after is not None and stop_after > self.training.steps:
      raise ConfigError(
        f"training.stop_after {stop_after} is beyond training.steps"
        f" {self.training.steps}."
      )
    if not self.model.norm_eps:
      raise ConfigError(
        "model.norm_eps is 0, with which norms of zero vectors have no"
        " gradient; training needs a positive one, such as 1e-6."
      )
    if self.optimizer.warmup_steps >= self.training.steps:
      raise ConfigError(
        f"optimizer.warmup_steps {self.optimizer.warmup_steps} leaves nothing"
        f" of training.steps {self.training.steps}; it must be less."
      )


def _check_accept(names: Iterable[str]) -> None:
  """Raises ConfigError for what a run that is resumed cannot differ in."""
  sections = [field.name for field in dataclasses.fields(RunConfig)]
  known = {"data.content", *sections, *_field_names(RunConfig)}
  valid = [x for x in known if not _is_of_model(x)]
  for name in names:
    if _is_of_model(name):
      raise ConfigError(
        f"training.accept {name!r}: checkpoints hold this model; it cannot"
        " become another. Start a run with --init-from."
      )
    check_name("name in training.accept", name, valid)


def _is_of_model(name: str) -> bool:
  """Whether a field of a run, or a section, says which model it has."""
  return name.split(".")[0] in ("model", "init_from", "freeze")


def _field_names(cls: type, prefix: str = "") -> Iterator[str]:
  """Dotted names of all fields that hold a value, as in `differences`."""
  for name, hint in typing.get_type_hints(cls).items():
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
      yield from _field_names(hint, f"{prefix}{name}.")
    else:
      yield prefix + name


def to_dict(config: Any) -> dict[str, Any]:
  """A config as nested dictionaries of plain values, ready for JSON."""
  return dataclasses.asdict(config)


def from_dict(cls: type[T], values: Any) -> T:
  """Inverse of `to_dict`; ConfigError for what it cannot have written."""
  if not isinstance(values, Mapping):
    raise ConfigError(
      f"{cls.__name__} is {values!r}; it must be a mapping of its fields."
    )
  hints = typing.get_type_hints(cls)
  arguments = {}
  for name, value in values.items():
    check_name(f"{cls.__name__} field", name, hints)
    if dataclasses.is_dataclass(hints[name]):
      value = from_dict(hints[name], value)
    # JSON has lists only.
    arguments[name] = tuple(value) if isinstance(value, list) else value
  return cls(**arguments)


def differences(old: Any, new: Any, prefix: str = "") -> dict[str, tuple]:
  """Fields in which two configs differ: dotted name -> (old, new)."""
  found: dict[str, tuple] = {}
  for field in dataclasses.fields(old):
    before, after = getattr(old, field.name), getattr(new, field.name)
    name = prefix + field.name
    if dataclasses.is_dataclass(before) and type(before) is type(after):
      found |= differences(before, after, f"{name}.")
    elif before != after:
      found[name] = (before, after)
  return found

"""The table of residual variants: every method of the papers is one row.

A row says which earlier vectors a sublayer reads, how it combines them with
its stream, and what it appends to the depth memory. The model has no branch on
a variant's name: `routing/schedule.py` turns a row into integer tables and one
scanned program runs them.

References:
  Attention Residuals (AttnRes), Kimi Team, arXiv 2603.15031.
  Delta Attention Residuals, Luo, Cai and Hu, arXiv 2605.18855.
  Role-Decoupled Attention Residuals, Wang, arXiv 2608.01075.
  Multi-Head AttnRes, arXiv 2607.27230. Low-Rank AttnRes, arXiv 2607.09694.

Examples:
  >>> VARIANTS["delta"].summary
  'u = p + mix(e, v_0 .. v_{s-1})'
  >>> [name for name, row in VARIANTS.items() if not row.additive][:2]
  ['attnres_full', 'attnres_block']
"""

from collections.abc import Callable, Mapping
import dataclasses
import types
from typing import Literal

import jax

from deltajax.routing.validation import (
  check_name,
  ConfigError,
  typed_config,
)

Matrix = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Roles:
  """How the learned queries of a sublayer become the inputs that it reads.

  An attention sublayer has two roles: Q and K read one input, V another. Both
  maps are small constant matrices, so that a role split and all its controls
  are data.

  Attributes:
    queries: [R, learned queries]. Each read's query as a combination of the
      learned ones. No columns: nothing is learned and queries are zero.
    inputs: [roles, R]. Each role's input as a combination of the reads. One
      row: all roles share it.

  References:
    Role-Decoupled AttnRes, arXiv 2608.01075.

  Examples:
    >>> roles = VARIANTS["rd_delta"].roles  # One read for Q and K, one for V.
    >>> roles.num_queries, roles.num_reads, len(roles.inputs)
    (2, 2, 2)
  """

  queries: Matrix = ((1.0,),)
  inputs: Matrix = ((1.0,),)

  @property
  def num_queries(self) -> int:
    """How many queries are learned."""
    return len(self.queries[0])

  @property
  def num_reads(self) -> int:
    """R, how many times the sources are read."""
    return len(self.queries)


_BOTH: Matrix = ((1.0, 0.0), (0.0, 1.0))

SHARED = Roles()
UNIFORM = Roles(queries=((),))
SPLIT = Roles(queries=_BOTH, inputs=_BOTH)
TIED = Roles(queries=((1.0,), (1.0,)), inputs=_BOTH)
AVERAGE = Roles(queries=_BOTH, inputs=((0.5, 0.5), (0.5, 0.5)))
FROZEN_V = Roles(queries=((1.0,), (0.0,)), inputs=_BOTH)


@dataclasses.dataclass(frozen=True)
class Variant:
  """One row of the table.

  Attributes:
    summary: one line for tables and `--help`.
    additive: the sublayer reads `stream + mix`; otherwise `mix` alone.
    appends: what becomes a slot of the memory when a block closes. `delta`:
      what the block added to the stream; `state`: the stream; `difference`:
      the stream minus the newest slot (the authors' released recurrence).
    block: a block is one sublayer, or a run of whole transformer layers.
    embedding_source: slot 0 of the memory is the token embedding.
    running_source: the one source that is not in the memory. `delta`: what the
      current block has added so far, if anything; `stream`: the stream.
    first_read: the first sublayer reads the memory. Additive variants have
      nothing to gain there: the embedding is the stream.
    newest_hidden: the sublayer that opens a block does not see the slot
      appended just before it.
    final_read: one more read feeds the final norm, in place of the stream.
    roles: roles of an attention sublayer; the MLP and the final read have one.
    gate: the gate that is part of the row, used when the config names none.

  Examples:
    >>> row = VARIANTS["delta_block"]
    >>> row.additive, row.appends, row.block, row.running_source
    (True, 'delta', 'layers', 'delta')
  """

  summary: str
  additive: bool = True
  appends: Literal["nothing", "delta", "state", "difference"] = "nothing"
  block: Literal["sublayer", "layers"] = "sublayer"
  embedding_source: bool = False
  running_source: Literal["none", "delta", "stream"] = "none"
  first_read: bool = True
  newest_hidden: bool = False
  final_read: bool = False
  roles: Roles = UNIFORM
  gate: str = "none"

  @property
  def learned(self) -> bool:
    """Whether reads have queries and key norms."""
    return self.roles.num_queries > 0

  @property
  def attention_appends(self) -> str:
    """What an attention sublayer may append: blocks of layers end with MLPs."""
    return self.appends if self.block == "sublayer" else "nothing"

  @property
  def single_role(self) -> Roles:
    """Roles of the reads that have one role: the MLP's and the final one."""
    return SHARED if self.learned else UNIFORM


_STANDARD = Variant(summary="u = p: a pre-norm transformer")
_ATTNRES_FULL = Variant(
  summary="u = mix(e, v_0 .. v_{s-1})",
  additive=False,
  appends="delta",
  embedding_source=True,
  running_source="delta",
  final_read=True,
  roles=SHARED,
)
_ATTNRES_BLOCK = dataclasses.replace(
  _ATTNRES_FULL,
  summary="u = mix(e, closed block sums, running sum)",
  block="layers",
)
_DELTA = Variant(
  summary="u = p + mix(e, v_0 .. v_{s-1})",
  appends="delta",
  embedding_source=True,
  running_source="delta",
  first_read=False,
  roles=SHARED,
)
_DELTA_BLOCK = dataclasses.replace(
  _DELTA,
  summary="u = p + mix(e, closed block deltas, running delta)",
  block="layers",
)
_EMBEDDING_SKIP = Variant(
  summary="u = p + e, no parameters", embedding_source=True
)

VARIANTS: Mapping[str, Variant] = types.MappingProxyType(
  {
    "standard": _STANDARD,
    "attnres_full": _ATTNRES_FULL,
    "attnres_block": _ATTNRES_BLOCK,
    "delta": _DELTA,
    "delta_block": _DELTA_BLOCK,
    "delta_block_closed": dataclasses.replace(
      _DELTA_BLOCK,
      summary="u = p + mix(e, closed block deltas)",
      running_source="none",
    ),
    "delta_block_released": dataclasses.replace(
      _DELTA_BLOCK,
      summary="u = p + mix(e, D1, e + D2, D1 + D3, ...)",
      appends="difference",
      running_source="none",
      first_read=True,
      newest_hidden=True,
    ),
    "rd_attnres": dataclasses.replace(
      _ATTNRES_BLOCK,
      summary="attnres_block, one read for Q and K, one for V",
      roles=SPLIT,
    ),
    "rd_delta": dataclasses.replace(
      _DELTA, summary="delta, one read for Q and K, one for V", roles=SPLIT
    ),
    "rd_delta_block": dataclasses.replace(
      _DELTA_BLOCK,
      summary="delta_block, one read for Q and K, one for V",
      roles=SPLIT,
    ),
    "rd_tied": dataclasses.replace(
      _ATTNRES_BLOCK,
      summary="control: rd_attnres with w_v = w_qk, read twice",
      roles=TIED,
    ),
    "rd_average": dataclasses.replace(
      _ATTNRES_BLOCK,
      summary="control: rd_attnres, both roles get the mean of the reads",
      roles=AVERAGE,
    ),
    "rd_frozen_v": dataclasses.replace(
      _ATTNRES_BLOCK,
      summary="control: rd_attnres with w_v = 0, a uniform V route",
      roles=FROZEN_V,
    ),
    "full_additive": Variant(
      summary="ablation: u = p + mix(p_1 .. p_s), cumulative states",
      appends="state",
      roles=SHARED,
    ),
    "delta_replace": Variant(
      summary="ablation: u = mix(v_0 .. v_{s-1}, p)",
      additive=False,
      appends="delta",
      running_source="stream",
      roles=SHARED,
    ),
    "full_replace": Variant(
      summary="ablation: u = mix(e, p_1 .. p_s), cumulative states",
      additive=False,
      appends="state",
      embedding_source=True,
      roles=SHARED,
    ),
    "embedding_skip": _EMBEDDING_SKIP,
    "embedding_skip_scaled": dataclasses.replace(
      _EMBEDDING_SKIP,
      summary="control: u = p + c e, c learned from 0",
      gate="scalar",
    ),
  }
)


@dataclasses.dataclass(frozen=True)
class Gate:
  """A learned scalar c per sublayer: `u = p + c * (read - p)`.

  Attributes:
    initial: initial value of the parameter.
    function: maps the parameter to c.
  """

  initial: float
  function: Callable[[jax.Array], jax.Array]


GATES: Mapping[str, Gate | None] = types.MappingProxyType(
  {
    "none": None,
    "scalar": Gate(initial=0.0, function=lambda g: g),
    "sigmoid": Gate(initial=-2.0, function=jax.nn.sigmoid),
  }
)


@typed_config
class RoutingConfig:
  """Which variant runs, and the options that combine with it.

  Attributes:
    variant: its name in `VARIANTS`; `VARIANTS[name].summary` describes it.
    num_blocks: blocks of ceil(num_layers / num_blocks) whole transformer
      layers. Variants whose blocks are single sublayers have no use for it.
    heads: depth-attention heads H: query and width are split into H groups
      with a softmax each; the key norm is over the full width (2607.27230).
    key_dim: keys are the last `key_dim` channels of a source and are normed
      over those; queries and key norms have this size (2607.09694). None: D.
    gate: `none`, `scalar` (starts at 0) or `sigmoid` (starts at -2).
    null_source: one learned vector per sublayer, a source that can take
      weight from the others.
    query_init_std: standard deviation of the initial queries. With 0 all
      weights start equal, and most variants as the standard model.

  Raises:
    ConfigError: for an unknown variant or gate, a value out of range, or an
      option that the variant has no use for.

  References:
    Those of the variants are at the head of this module. Heads: Multi-Head
    AttnRes, arXiv 2607.27230; key_dim: Low-Rank AttnRes, arXiv 2607.09694.

  Examples:
    >>> RoutingConfig(variant="rd_delta", heads=2).row.summary
    'delta, one read for Q and K, one for V'
  """

  variant: str = "delta_block"
  num_blocks: int = 4
  heads: int = 1
  key_dim: int | None = None
  gate: str = "none"
  null_source: bool = False
  query_init_std: float = 0.0

  def __post_init__(self) -> None:
    check_name("variant", self.variant, VARIANTS)
    check_name("gate", self.gate, GATES)
    for name in ("num_blocks", "heads", "key_dim"):
      value = getattr(self, name)
      if value is not None and value < 1:
        raise ConfigError(f"routing.{name} is {value}; it must be at least 1.")
    if self.query_init_std < 0:
      raise ConfigError(
        f"routing.query_init_std is {self.query_init_std}; a standard"
        " deviation cannot be negative."
      )
    row = self.row
    if not row.learned:
      unused = ("heads", "key_dim", "null_source", "query_init_std")
      defaults = {f.name: f.default for f in dataclasses.fields(self)}
      for name in unused:
        value = defaults[name]
        if getattr(self, name) != value:
          raise ConfigError(
            f"routing.{name}={getattr(self, name)!r} has no meaning for"
            f" variant {self.variant!r}, which learns no read; leave it at"
            f" {value!r} or choose another variant."
          )
    can_gate = row.additive and (row.embedding_source or row.learned)
    if self.gate != "none" and not can_gate:
      raise ConfigError(
        f"routing.gate={self.gate!r} needs an additive variant: a gate scales"
        f" what a read adds to the stream, and {self.variant!r} adds nothing"
        " to it. Use gate='none' or a variant like 'delta_block'."
      )

  @property
  def row(self) -> Variant:
    """The variant's row of the table."""
    return VARIANTS[self.variant]

  @property
  def gate_name(self) -> str:
    """The gate in force, of `GATES`: the config's, or else the row's own."""
    return self.row.gate if self.gate == "none" else self.gate

  @property
  def gate_function(self) -> Gate | None:
    """The gate in force; None without one."""
    return GATES[self.gate_name]

  def key_size(self, width: int) -> int:
    """Channels of a key (and of queries and key norms) at this width."""
    return width if self.key_dim is None else self.key_dim

  def check_width(self, width: int) -> None:
    """Raises ConfigError unless the options fit sources of this width."""
    key_size = self.key_size(width)
    if key_size > width:
      raise ConfigError(
        f"routing.key_dim is {key_size}, more than the width {width}; keys"
        " are the last key_dim channels of a source."
      )
    for name, size in (("width", width), ("key_dim", key_size)):
      if size % self.heads:
        raise ConfigError(
          f"{name} {size} is not divisible by routing.heads {self.heads}."
        )

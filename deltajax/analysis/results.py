"""What an analysis finds, as named values; docs/analysis.md says the same.

Means are over tokens (padding is not counted) and heads of the depth attention;
`_std` is the standard deviation over the same.
"""

from collections.abc import Callable, Sequence
import dataclasses
import math

SCHEMA = "deltajax.routing"
VERSION = 2


@dataclasses.dataclass(frozen=True)
class ReadStatistics:
  """One softmax over depth.

  Attributes:
    name: for example `layer 3 attention V`, or `final`.
    kind: `attention`, `mlp` or `final`.
    layer: transformer layer; None for the final read.
    role: `Q/K` or `V`; empty where all roles share the read.
    sources: names of the N sources that it sees, `null` first if there is one.
    open_source: whether the last source is what runs along: what the open block
      has added so far (`b2+`), the newest output, or the stream.
    weight: mean weight of each source.
    weight_std: its standard deviation.
    max_weight: mean of the largest weight.
    max_weight_std: its standard deviation.
    uniform_weight: 1/N, which the largest weight of a uniform read is.
    entropy: mean entropy in nats.
    entropy_std: its standard deviation.
    uniform_entropy: ln N.
    effective_sources: mean of e to the entropy: N if uniform, 1 if one source
      has all the weight.
    weight_by_position: mean weight of each source in each bin of positions;
      None for a bin without tokens.
    max_weight_by_position: mean of the largest weight in each bin.
  """

  name: str
  kind: str
  layer: int | None
  role: str
  sources: list[str]
  open_source: bool
  weight: list[float]
  weight_std: list[float]
  max_weight: float
  max_weight_std: float
  uniform_weight: float
  entropy: float
  entropy_std: float
  uniform_entropy: float
  effective_sources: float
  weight_by_position: list[list[float] | None]
  max_weight_by_position: list[float | None]

  @property
  def favourite(self) -> str:
    """The source with the largest mean weight, the first of those that tie."""
    return self.sources[self.weight.index(max(self.weight))]


@dataclasses.dataclass(frozen=True)
class Divergence:
  """How far apart the Q/K and V reads of a layer are.

  Attributes:
    layer: transformer layer.
    jensen_shannon: mean divergence in nats, from 0 (equal) to ln 2 (disjoint).
    jensen_shannon_std: its standard deviation.
  """

  layer: int
  jensen_shannon: float
  jensen_shannon_std: float


@dataclasses.dataclass(frozen=True)
class Similarity:
  """How alike the vectors of a family are.

  Attributes:
    family: `deltas`, `block_deltas`, `cumulative` or `released`.
    vectors: their names.
    cosine: mean cosine of every two.
    mean_cosine: mean of that over pairs of different vectors.
    effective_rank: from 1 (all parallel) to their number.
  """

  family: str
  vectors: list[str]
  cosine: list[list[float]]
  mean_cosine: float
  effective_rank: float


@dataclasses.dataclass(frozen=True)
class Norms:
  """Sizes over depth, means over tokens.

  Attributes:
    stream_rms: of the stream before each sublayer and after the last, [2L + 1].
    output_rms: of what each sublayer puts out, [2L].
    input_rms: of what each sublayer reads, before its norm, for each role
      (`Q/K`, `V`, or one for all), [2L].
    gradient_norm: Euclidean norm of the gradient of the summed token losses by
      what each sublayer puts out, nats per unit, [2L]; None if not asked for.
  """

  stream_rms: list[float]
  output_rms: list[float]
  input_rms: list[list[float]]
  gradient_norm: list[float] | None


@dataclasses.dataclass(frozen=True)
class Totals:
  """Sharpness at a glance: means over sublayers that see several sources.

  The final read counts as a sublayer. Reads of one sublayer share its weight,
  so that models with split roles stand beside those without.

  Attributes:
    reads: how many reads these sublayers make.
    max_weight: mean largest weight.
    uniform_weight: what it would be if all were uniform.
    entropy: mean entropy, nats.
    uniform_entropy: what it would be if all were uniform.
    effective_sources: mean effective number of sources.
    sources: mean number of sources.
    jensen_shannon: mean divergence over layers, nats; None without roles.
  """

  reads: int
  max_weight: float
  uniform_weight: float
  entropy: float
  uniform_entropy: float
  effective_sources: float
  sources: float
  jensen_shannon: float | None


@dataclasses.dataclass(frozen=True)
class Analysis:
  """What a model did on a data set.

  Attributes:
    variant: of the routing.
    num_layers: L.
    width: D.
    tokens: how many were read.
    loss: mean next-token loss, nats.
    position_bins: first and last position within a document of each bin.
    tokens_by_position: tokens in each bin.
    totals: over all sublayers; None if no read has a choice.
    reads: in order of depth.
    divergences: of layers whose roles read apart, where there are two sources
      or more.
    similarities: of families of vectors.
    norms: over depth.
    notes: what one should know to read it.
  """

  variant: str
  num_layers: int
  width: int
  tokens: int
  loss: float
  position_bins: list[list[int]]
  tokens_by_position: list[int]
  totals: Totals | None
  reads: list[ReadStatistics]
  divergences: list[Divergence]
  similarities: list[Similarity]
  norms: Norms
  notes: list[str]


def summarize(
  reads: Sequence[ReadStatistics], divergences: Sequence[Divergence]
) -> Totals | None:
  """The totals of reads that have a choice; None if none has."""
  sublayers: dict[tuple[str, int | None], list[ReadStatistics]] = {}
  for read in reads:
    if len(read.sources) > 1:
      sublayers.setdefault((read.kind, read.layer), []).append(read)
  if not sublayers:
    return None

  def mean(of: Callable[[ReadStatistics], float]) -> float:
    return _mean([_mean([of(x) for x in own]) for own in sublayers.values()])

  return Totals(
    reads=sum(map(len, sublayers.values())),
    max_weight=mean(lambda read: read.max_weight),
    uniform_weight=mean(lambda read: read.uniform_weight),
    entropy=mean(lambda read: read.entropy),
    uniform_entropy=mean(lambda read: read.uniform_entropy),
    effective_sources=mean(lambda read: read.effective_sources),
    sources=mean(lambda read: len(read.sources)),
    jensen_shannon=_mean([x.jensen_shannon for x in divergences])
    if divergences
    else None,
  )


def _mean(values: Sequence[float]) -> float:
  return math.fsum(values) / len(values)

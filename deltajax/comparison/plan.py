"""What a comparison asks for: arms, seeds, pairs, and the runs they make."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import re
from typing import Any

from deltajax.config import ConfigError, RunConfig
from deltajax.routing.validation import check_name, typed_config

# Dotted fields of a RunConfig -> values: {"model.routing.variant": "delta"}.
Arm = Mapping[str, Any]

# The same for all arms, or it would not be a comparison.
_SHARED = (
  *("data", "init_from", "model.init_std"),
  *("training.seed", "training.batch_size", "training.accumulation"),
  *("training.steps", "training.stop_after"),
  *("training.eval_sequences", "training.log_every"),
)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
  """One arm with one seed.

  Attributes:
    arm: its name.
    seed: of parameters and data order.
    config: of the run.
    directory: of the run.
  """

  arm: str
  seed: int
  config: RunConfig
  directory: pathlib.Path

  def __str__(self) -> str:
    return f"{self.arm} seed {self.seed}"


@dataclasses.dataclass(frozen=True)
class Pair:
  """An arm and what it is compared with.

  Attributes:
    arm: name of the arm.
    baseline: name of another.
  """

  arm: str
  baseline: str

  def __str__(self) -> str:
    return f"{self.arm} - {self.baseline}"


@typed_config
class Comparison:
  """Arms that are trained with the same seeds and compared in pairs.

  Attributes:
    base: the config that all arms share.
    arms: name -> fields in which an arm differs from the base.
    baseline: the arm that all others are compared with.
    pairs: arm -> further arms that it is compared with.
    seeds: each is one run of every arm, with the same data and the same initial
      parameters.

  Raises:
    ConfigError: for an unknown arm or field, a value that a field cannot have,
      names that are no directory names, seeds that repeat, or arms that differ
      in what they read.
  """

  base: RunConfig
  arms: dict
  baseline: str
  pairs: dict = dataclasses.field(default_factory=dict)
  seeds: tuple[int, ...] = (0, 1, 2)

  def __post_init__(self) -> None:
    stop_after = self.base.training.stop_after
    if stop_after is not None:
      raise ConfigError(
        f"training.stop_after is {stop_after}; runs that are compared run to"
        " their end. Leave it out."
      )
    steps, log_every = self.base.training.steps, self.base.training.log_every
    if log_every > steps:
      raise ConfigError(
        f"training.log_every is {log_every}, more than the {steps} updates of a"
        " run, which would leave no curve; it must be at most training.steps."
      )
    check_name("baseline", self.baseline, self.arms)
    for name, overrides in self.arms.items():
      _check_arm(name, overrides, self.base)
    for name, others in self.pairs.items():
      for other in (name, *others):
        check_name("arm of pairs", other, self.arms)
    if not self.seeds:
      raise ConfigError("a comparison without seeds has no runs; name some.")
    if len(set(self.seeds)) < len(self.seeds):
      raise ConfigError(
        f"seeds are {self.seeds}; a seed that repeats is no new evidence. Name"
        " each once."
      )
    for seed in self.seeds:
      if not 0 <= seed < 2**32:
        raise ConfigError(f"seed {seed} must be from 0 to 2**32 - 1.")

  def config_of(self, arm: str, seed: int) -> RunConfig:
    """The config of a run."""
    return override(self.base, {**self.arms[arm], "training.seed": seed})

  def runs(self, out: pathlib.Path) -> list[PlannedRun]:
    """All runs, one seed after the other.

    A comparison that is interrupted then has whole pairs.

    Args:
      out: directory of the comparison.
    """
    return [
      PlannedRun(
        arm,
        seed,
        self.config_of(arm, seed),
        out / "runs" / arm / f"seed-{seed}",
      )
      for seed in self.seeds
      for arm in self.arms
    ]

  def all_pairs(self) -> list[Pair]:
    """Each arm with the baseline, then the further pairs."""
    first = [Pair(arm, self.baseline) for arm in self.arms]
    others = [
      Pair(arm, other) for arm, all_ in self.pairs.items() for other in all_
    ]
    return list(
      dict.fromkeys(x for x in (*first, *others) if x.arm != x.baseline)
    )

  def narrowed(self, arms: Sequence[str], seeds: Sequence[int]) -> "Comparison":
    """A part of it.

    The baseline stays if it is among the arms; else the first of them is one.

    Args:
      arms: names; none: all.
      seeds: none: all of the comparison's own.
    """
    for name in arms:
      check_name("arm", name, self.arms)
    kept = [name for name in self.arms if name in arms] if arms else self.arms
    return dataclasses.replace(
      self,
      arms={name: self.arms[name] for name in kept},
      baseline=self.baseline if self.baseline in kept else next(iter(kept)),
      pairs={
        name: tuple(other for other in others if other in kept)
        for name, others in self.pairs.items()
        if name in kept
      },
      seeds=tuple(seeds) or self.seeds,
    )


def override(config: Any, overrides: Mapping[str, Any]) -> Any:
  """A config with some fields replaced, all at once.

  Args:
    config: any typed config.
    overrides: dotted names of fields -> their new values.

  Raises:
    ConfigError: for an unknown field, or values that do not fit.
  """
  values: dict[str, Any] = {}
  nested: dict[str, dict[str, Any]] = {}
  names = [field.name for field in dataclasses.fields(config)]
  kind = type(config).__name__
  for dotted, value in overrides.items():
    name, _, rest = dotted.partition(".")
    check_name(f"{kind} field", name, names)
    if not rest:
      values[name] = value
    elif dataclasses.is_dataclass(getattr(config, name)):
      nested.setdefault(name, {})[rest] = value
    else:
      raise ConfigError(
        f"{kind}.{name} is {getattr(config, name)!r} and has no field {rest!r}."
      )
  for name, inner in nested.items():
    values[name] = override(values.get(name, getattr(config, name)), inner)
  return dataclasses.replace(config, **values)


def _check_arm(name: str, overrides: Arm, base: RunConfig) -> None:
  if not isinstance(name, str) or not re.fullmatch(r"\w[\w.+-]*", name):
    raise ConfigError(
      f"arm {name!r} names a directory; use letters, digits, '_', '.', '+' and"
      " '-'."
    )
  for field in overrides:
    shared = [x for x in _SHARED if field == x or field.startswith(f"{x}.")]
    if shared:
      raise ConfigError(
        f"arm {name!r} sets {field}, but arms must not differ in {shared[0]}:"
        " set it in the base of the comparison."
      )
  try:
    override(base, overrides)
  except ConfigError as error:
    raise ConfigError(f"arm {name!r}: {error}") from None

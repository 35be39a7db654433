"""A study: schedules are tuned first, then arms are compared with them.

The rule is fixed before anything is trained: of the candidates, each tuned arm
keeps the one with the least validation loss, on a seed that is not used again,
and so do the arms of its group.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math

from deltajax.comparison.plan import Arm, Comparison
from deltajax.comparison.results import ComparisonResult
from deltajax.config import ConfigError
from deltajax.routing.validation import check_name, typed_config

_BETWEEN = "+"


@typed_config
class Study:
  """What is tuned, what is compared, and what is looked into.

  Attributes:
    comparison: after tuning; all arms that no group names keep their schedule.
    candidates: name -> fields, tried with each tuned arm.
    groups: tuned arm -> arms that are given its best candidate, itself among
      them.
    tuning_seed: none of the comparison's.
    analysed_seed: one of the comparison's, whose models are looked into.

  Raises:
    ConfigError: for unknown arms, an arm in two groups, or seeds that are not
      as above.
  """

  comparison: Comparison
  candidates: dict
  groups: dict
  tuning_seed: int
  analysed_seed: int

  def __post_init__(self) -> None:
    arms, seeds = self.comparison.arms, self.comparison.seeds
    members = [name for group in self.groups.values() for name in group]
    for name in (*self.groups, *members):
      check_name("arm of groups", name, arms)
    twice = sorted({name for name in members if members.count(name) > 1})
    if twice:
      raise ConfigError(f"arm {twice[0]!r} is in two groups; name it once.")
    if self.tuning_seed in seeds:
      raise ConfigError(
        f"tuning_seed is {self.tuning_seed}, one of the seeds {seeds} that are"
        " compared; what was tuned on a seed looks too good on it. Name"
        " another."
      )
    if self.analysed_seed not in seeds:
      raise ConfigError(
        f"analysed_seed is {self.analysed_seed}; it must be one of the seeds"
        f" {seeds}."
      )
    if not self.candidates:
      raise ConfigError("a study without candidates tunes nothing; name some.")

  def narrowed(self, seeds: Sequence[int]) -> "Study":
    """With other seeds, and the first of them looked into if need be.

    Args:
      seeds: none: the study's own.
    """
    comparison = self.comparison.narrowed((), seeds)
    seeds = comparison.seeds
    kept = self.analysed_seed in seeds
    return dataclasses.replace(
      self,
      comparison=comparison,
      analysed_seed=self.analysed_seed if kept else seeds[0],
    )

  def tuning(self) -> Comparison:
    """The runs that the schedules are chosen by."""
    arms = {
      f"{arm}{_BETWEEN}{name}": {**self.comparison.arms[arm], **fields}
      for arm in self.groups
      for name, fields in self.candidates.items()
    }
    return Comparison(
      base=self.comparison.base,
      arms=arms,
      baseline=next(iter(arms)),
      seeds=(self.tuning_seed,),
    )

  def tuned(self, chosen: Mapping[str, str]) -> Comparison:
    """The comparison with the schedules that were chosen.

    Args:
      chosen: tuned arm -> candidate.
    """
    fields: dict[str, Arm] = {
      member: self.candidates[chosen[arm]]
      for arm, group in self.groups.items()
      for member in group
    }
    arms = {
      name: {**overrides, **fields.get(name, {})}
      for name, overrides in self.comparison.arms.items()
    }
    return dataclasses.replace(self.comparison, arms=arms)


@dataclasses.dataclass(frozen=True)
class TuningResult:
  """What tuning found.

  Attributes:
    losses: tuned arm -> candidate -> validation loss, nats per token; infinite
      of a run that died.
    chosen: tuned arm -> candidate with the least loss.
  """

  losses: dict[str, dict[str, float]]
  chosen: dict[str, str]

  @classmethod
  def of(cls, study: Study, result: ComparisonResult) -> "TuningResult":
    """What the runs of `study.tuning()` say.

    Args:
      study: that is tuned.
      result: of the runs that did not die.

    Raises:
      ConfigError: if all candidates of an arm died.
    """
    done = {arm.name: arm.mean_loss for arm in result.arms}
    losses = {
      arm: {
        name: done.get(f"{arm}{_BETWEEN}{name}", math.inf)
        for name in study.candidates
      }
      for arm in study.groups
    }
    for arm, found in losses.items():
      if min(found.values()) == math.inf:
        raise ConfigError(
          f"all runs that tune {arm!r} died: {', '.join(found)}; name other"
          " candidates in the study."
        )
    chosen = {
      arm: min(found, key=found.__getitem__) for arm, found in losses.items()
    }
    return cls(losses, chosen)

  def at_edge(self) -> list[str]:
    """Tuned arms whose best candidate is the first or the last."""
    return [
      arm
      for arm, found in self.losses.items()
      if len(found) > 2
      and self.chosen[arm] in (next(iter(found)), list(found)[-1])
    ]

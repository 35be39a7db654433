"""Tasks of lm-eval: found, loaded and run, with results in plain values.

lm-eval (extra `eval`) is imported where it is needed.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import difflib
import math
import os
import pathlib
import sys
from typing import Any

from deltajax.config import ConfigError
from deltajax.extras import install
from deltajax.files import digest_of

# Groups that are not lm-eval's: their number is the plain mean of `acc`.
GROUPS = {
  # The zero-shot mean of Delta Attention Residuals, arXiv 2605.18855.
  "delta_paper": (
    *("hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande"),
    *("boolq", "mmlu", "lambada_openai"),
  ),
}
GROUP_METRIC = "acc"
# Of the standard errors that have no formula: known to some 2%.
BOOTSTRAPS = 1000


@dataclasses.dataclass(frozen=True)
class Tasks:
  """Tasks whose data are there.

  Attributes:
    names: as they were asked for, groups of `GROUPS` included.
    loaded: by lm-eval.
    manager: that loaded them.
  """

  names: tuple[str, ...]
  loaded: dict[str, Any]
  manager: Any

  def bound_generation(self, most: int | None, context: int) -> None:
    """Makes tasks ask for no more new tokens than this.

    Args:
      most: tokens; None for as many as tasks say.
      context: tokens that the model sees at once.

    Raises:
      ConfigError: if a task then leaves no room for a text to be continued.
    """
    from deltajax.evaluation.harness import generation_length

    for name, task in self.loaded["tasks"].items():
      if task.config.output_type != "generate_until":
        continue
      asked = generation_length(task.config.generation_kwargs or {})
      allowed = min(asked, most or asked)
      if allowed >= context:
        raise ConfigError(
          f"task {name} lets a model generate {allowed} tokens, and this one"
          f" sees {context}; give --max-new-tokens of less."
        )
      task.set_config(
        "generation_kwargs", {"max_gen_toks": allowed}, update=True
      )


def check_lm_eval() -> None:
  """Raises ConfigError, with the remedy, unless lm-eval is there."""
  try:
    import lm_eval  # noqa: F401
  except ImportError as error:
    raise ConfigError(
      f"tasks need lm-eval ({error}): {install('eval')}."
    ) from None


def load_tasks(
  names: Sequence[str], include_paths: Sequence[pathlib.Path] = ()
) -> Tasks:
  """Finds tasks, and loads their data, which lm-eval may have to download.

  Args:
    names: of tasks, groups and tags of lm-eval, or of `GROUPS`.
    include_paths: directories with the YAML files of more tasks.

  Raises:
    ConfigError: for a name that there is not, with those nearest to it; for a
      directory that is not there, and for data that cannot be loaded.
  """
  check_lm_eval()
  from lm_eval.tasks import TaskManager

  paths: list[str | pathlib.Path] = []
  for path in include_paths:
    if not path.is_dir():
      raise ConfigError(f"--include-path {path}: there is no such directory.")
    paths.append(path)
  if len(set(names)) < len(names):
    raise ConfigError(f"of {' '.join(names)}, one is named twice.")
  wanted = [x for name in names for x in GROUPS.get(name, (name,))]
  manager = TaskManager(include_path=paths, include_defaults=False)
  if not set(wanted) <= set(manager.all_tasks):
    # To read what lm-eval brings along takes a while.
    manager = TaskManager(include_path=paths)
    _check_names(wanted, manager.all_tasks)
  try:
    loaded = manager.load(list(dict.fromkeys(wanted)))
  # Data sets, templates and scripts of others raise what they like.
  except Exception as error:
    raise ConfigError(
      f"the tasks {', '.join(wanted)} cannot be loaded:"
      f" {type(error).__name__}: {error}"
    ) from error
  return Tasks(tuple(names), dict(loaded), manager)


def _check_names(wanted: Sequence[str], known: Sequence[str]) -> None:
  names = [*known, *GROUPS]
  for name in wanted:
    if name in known:
      continue
    nearest = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
    raise ConfigError(
      f"unknown task {name!r} of {len(names):,}{hint}. `lm-eval ls tasks` lists"
      " all that lm-eval has; --include-path adds a directory of your own."
    )


def run_tasks(
  lm: Any,
  tasks: Tasks,
  *,
  limit: int | None = None,
  num_fewshot: int | None = None,
) -> dict[str, Any]:
  """Runs a model on tasks.

  Args:
    lm: a `HarnessLM`, or another model of lm-eval.
    tasks: that are run.
    limit: documents of each task; None for all.
    num_fewshot: examples in front of each document; None: as tasks say.

  Returns:
    `tasks` and `groups`, for the file of results.
  """
  from lm_eval import simple_evaluate

  leaves = tasks.loaded["tasks"]
  groups = tasks.loaded.get("groups", {})
  with _no_other_processes():
    found = simple_evaluate(
      model=lm,
      tasks=list(leaves.values()),
      task_manager=tasks.manager,
      limit=limit,
      num_fewshot=num_fewshot,
      bootstrap_iters=BOOTSTRAPS,
      log_samples=True,
    )
  assert found is not None
  scores = found["results"] | {
    name: group.aggregate(found["results"]) for name, group in groups.items()
  }
  higher = dict(found["higher_is_better"])
  for name, group in groups.items():
    members = [task.task_name for task in group.get_all_tasks()]
    higher[name] = higher[members[0]]
  described = {
    name: _metrics(values, higher.get(name, {}))
    for name, values in scores.items()
  }
  return {
    "tasks": [
      {
        "name": name,
        "version": found["versions"].get(name),
        "shots": found["n-shot"].get(name),
        "context": lm.max_length,
        "samples": found["n-samples"][name]["effective"],
        "fingerprint": _samples_digest(found["samples"][name]),
        "metrics": described[name],
      }
      for name in leaves
    ],
    "groups": [
      {"name": name, "tasks": group.child_names, "metrics": described[name]}
      for name, group in groups.items()
    ]
    + [
      {
        "name": name,
        "tasks": list(GROUPS[name]),
        "metrics": [_mean([described[x] for x in GROUPS[name]])],
      }
      for name in tasks.names
      if name in GROUPS
    ],
  }


@contextlib.contextmanager
def _no_other_processes() -> Iterator[None]:
  """Has lm-eval draw its bootstraps here, and print to where it logs.

  It would fork, which a process with JAX's threads may not survive.
  """
  name = "DISABLE_MULTIPROC"
  before = os.environ.get(name)
  os.environ[name] = "1"
  try:
    with contextlib.redirect_stdout(sys.stderr):
      yield
  finally:
    if before is None:
      del os.environ[name]
    else:
      os.environ[name] = before


def _metrics(
  values: dict[str, Any], higher: dict[str, bool | None]
) -> list[dict[str, Any]]:
  """The metrics of a task or group, which lm-eval calls `metric,filter`."""
  found = []
  for key, value in values.items():
    name, _, kind = key.partition(",")
    if not kind or name.endswith("_stderr"):
      continue
    error = values.get(f"{name}_stderr,{kind}")
    found.append(
      {
        "name": name,
        "filter": kind,
        "value": _finite(value),
        "standard_error": _finite(error),
        "higher_is_better": higher.get(name),
      }
    )
  return found


def _finite(value: Any) -> float | None:
  """A number as JSON can hold it; lm-eval writes N/A for what is not known."""
  known = isinstance(value, int | float) and math.isfinite(value)
  return float(value) if known else None


def _mean(tasks: Sequence[list[dict[str, Any]]]) -> dict[str, Any]:
  """The plain mean over tasks, each taken to be independent of the others."""
  chosen = [
    next(x for x in metrics if x["name"] == GROUP_METRIC) for metrics in tasks
  ]
  errors = [x["standard_error"] for x in chosen]
  error = None
  if None not in errors:
    error = math.sqrt(sum(x**2 for x in errors)) / len(errors)
  return {
    "name": GROUP_METRIC,
    "filter": "none",
    "value": sum(x["value"] for x in chosen) / len(chosen),
    "standard_error": error,
    "higher_is_better": True,
  }


def _samples_digest(samples: Sequence[dict[str, Any]]) -> str:
  """sha256 (hex) of documents, prompts and targets."""
  return digest_of(
    [[x["doc_hash"], x["prompt_hash"], x["target_hash"]] for x in samples]
  )

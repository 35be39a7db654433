"""Looks inside the routing of trained models, side by side.

    python -m train.analyze runs/quickstart --out runs/quickstart-routing
    python -m train.analyze runs/delta runs/attnres --out DIR

Each model is a run, one of its checkpoints, or a model directory; all are run
on the same rows of the same data set. The output directory gets routing.json,
figures, and report.html, which holds all of it (docs/analysis.md).
"""

import dataclasses
import pathlib
from typing import Annotated

import tyro

from deltajax.analysis import figures, report
from deltajax.analysis.analyze import analyze
from deltajax.analysis.inputs import AnalysisData, load_data
from deltajax.analysis.results import Analysis
from deltajax.config import ConfigError, to_dict
from deltajax.training.dtypes import dtype_here
from deltajax.training.subjects import (
  common_data,
  default_batch_size,
  find_subjects,
  MeshSizes,
  place_model,
  PlacedModel,
  Subject,
)
from train.cli import check_counts, main
from train.options import about_of, parse_options


@dataclasses.dataclass(frozen=True)
class Options:
  """Looks inside the routing of trained models, side by side.

  Attributes:
    sources: runs, checkpoints of runs, or model directories.
    out: the directory that is written; an earlier analysis is replaced.
    data: a name, the directory of a TFDS data set, or files of text; None: the
      runs' own.
    split: of the data.
    data_dir: where data sets are kept; None: the first run's own.
    tokenizer: `bytes`, or the path of a tokenizer.json; None: the models' own.
    context: tokens that a model sees at once; None: the runs' own.
    rows: how many rows are read, always the same ones.
    batch_size: rows at once; None: as the first run has on its devices.
    dtype: of activations and matrix products; None: float32 on a CPU, and
      elsewhere the model's.
    gradients: whether to take norms of gradients.
    mesh: of devices.
  """

  sources: tyro.conf.Positional[
    Annotated[
      tuple[pathlib.Path, ...],
      tyro.conf.arg(metavar="RUN_OR_DIR ...", help_behavior_hint="(required)"),
    ]
  ]
  out: pathlib.Path
  data: str | None = None
  split: str = "validation"
  data_dir: str | None = None
  tokenizer: str | None = None
  context: int | None = None
  rows: int = 64
  batch_size: int | None = None
  dtype: str | None = None
  gradients: bool = True
  mesh: MeshSizes = dataclasses.field(default_factory=MeshSizes)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Everything that is known before a parameter is loaded.

  Attributes:
    subjects: the models.
    placed: how each lies on its mesh.
    data: what they are run on.
  """

  subjects: list[Subject]
  placed: list[PlacedModel]
  data: AnalysisData


def prepare(options: Options) -> Plan:
  """Whatever can be wrong, before any work.

  Raises:
    ConfigError: for models, data, meshes or an output that cannot be used.
  """
  if not options.sources:
    raise ConfigError(
      "there is nothing to analyse; name runs, checkpoints of runs, or model"
      " directories."
    )
  check_counts(rows=options.rows, batch_size=options.batch_size)
  figures.check_matplotlib()
  report.check_output(options.out)
  subjects = find_subjects(options.sources)
  config = common_data(
    subjects,
    {
      "dataset": options.data,
      "data_dir": options.data_dir,
      "tokenizer": options.tokenizer,
      "sequence_length": options.context,
    },
  )
  batch_size = options.batch_size
  if batch_size is None:
    batch_size = default_batch_size(subjects)
  dtype = dtype_here(options.dtype)
  placed = [
    place_model(subject, config, batch_size, options.mesh, dtype)
    for subject in subjects
  ]
  data = load_data(
    config,
    split=options.split,
    num_rows=options.rows,
    batch_size=batch_size,
  )
  return Plan(subjects, placed, data)


def parse(arguments: list[str]) -> Options:
  """Parses the command line."""
  usage = "python -m train.analyze  RUN_OR_DIR ... --out DIR [--rows N ...]"
  return parse_options(Options, usage, arguments, about=about_of(__doc__))


def command(arguments: list[str]) -> None:
  """Analyses, and says where the report is."""
  options = parse(arguments)
  plan = prepare(options)
  data = plan.data
  print(
    f"data      {' and '.join(data.config.datasets)}, split {data.split}:"
    f" {data.rows} rows of {data.config.sequence_length} tokens"
  )
  found: dict[str, Analysis] = {}
  for subject, placed in zip(plan.subjects, plan.placed, strict=True):
    print(f"model     {subject.stored}")
    params = subject.stored.load(placed.abstract_params()).params
    analysis = analyze(
      placed.config,
      params,
      data.batches,
      sequence_length=data.config.sequence_length,
      sharding=placed.sharding,
      gradients=options.gradients,
    )
    found[subject.name] = analysis
    print("\n".join(summary_lines(analysis)))
  report.write_report(
    options.out,
    data.described(),
    [
      report.AnalysedModel(
        subject.name,
        str(subject.stored),
        to_dict(subject.config),
        found[subject.name],
      )
      for subject in plan.subjects
    ],
    figures.draw(found),
  )
  print(f"report    {options.out / report.REPORT_NAME}")
  print(f"numbers   {options.out / report.JSON_NAME}")


def summary_lines(analysis: Analysis) -> list[str]:
  """An analysis in a few lines."""
  lines = [
    f"routing   {analysis.variant}; loss {analysis.loss:.4f} nats over"
    f" {analysis.tokens:,} tokens"
  ]
  totals = analysis.totals
  if totals is not None:
    lines += [
      f"weights   largest {totals.max_weight:.3f} (uniform"
      f" {totals.uniform_weight:.3f}), entropy {totals.entropy:.3f} nats"
      f" (uniform {totals.uniform_entropy:.3f}), {totals.effective_sources:.2f}"
      f" effective sources of {totals.sources:.2f}, over {totals.reads} reads"
    ]
    if totals.jensen_shannon is not None:
      lines.append(
        f"roles     {totals.jensen_shannon:.3f} nats between Q/K and V routes"
        " (at most 0.693)"
      )
  return lines + [f"note      {note}" for note in analysis.notes]


if __name__ == "__main__":
  main(command, resumes=False)

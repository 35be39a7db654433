"""Evaluates a model: perplexity and bits per byte of text, or tasks of lm-eval.

    python -m train.evaluate runs/quickstart
    python -m train.evaluate runs/quickstart --data ./texts.jsonl --stride 64
    python -m train.evaluate DIR --tasks delta_paper --out results.json

Without more, a run is evaluated on what it validates on. With `--stride` or
`--context`, documents are covered by windows. Tasks need the extra `eval`
(docs/evaluation.md).
"""

import dataclasses
import pathlib
import time
from typing import Annotated, Any, Literal

import tyro

from deltajax.config import ConfigError, DataConfig
from deltajax.data.tokenizers import get_tokenizer
from deltajax.evaluation import results
from deltajax.evaluation.scoring import Scorer
from deltajax.evaluation.tasks import load_tasks, run_tasks, Tasks
from deltajax.evaluation.texts import (
  open_text,
  own_length,
  Rows,
  Strides,
  Text,
)
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
from train.cli import check_counts, check_json_file, main, write_json_file
from train.options import about_of, parse_options


@dataclasses.dataclass(frozen=True)
class TextOptions:
  """Text that a model is evaluated on, and how it is covered.

  Attributes:
    data: data sets, each on its own: names, TFDS directories, prepared ones, or
      files of text; none: what the run reads.
    split: of the data sets; None: `validation`, and `all` of files of text.
    data_dir: where data sets are kept; None: the run's own.
    rows: packed rows that are read, or `all`; None: those that the run
      validates on, and all of other data.
    stride: covers documents by windows, in each of which this many tokens
      count; None, with `--context`: all of them.
    max_tokens: whole documents, in order, are scored up to this many tokens;
      with windows.
  """

  data: tuple[str, ...] = ()
  split: str | None = None
  data_dir: str | None = None
  rows: int | Literal["all"] | None = None
  stride: int | None = None
  max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class TaskOptions:
  """Tasks of lm-eval, in place of texts.

  Attributes:
    tasks: names of tasks and groups, or `delta_paper`.
    include_path: directories with YAML files of more tasks.
    limit: documents of each task at most.
    num_fewshot: examples in front of each document; None: as a task says.
    max_new_tokens: bounds what tasks let a model generate.
  """

  tasks: tuple[str, ...] = ()
  include_path: tuple[pathlib.Path, ...] = ()
  limit: int | None = None
  num_fewshot: int | None = None
  max_new_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Options:
  """Evaluates a model on texts, or on tasks of lm-eval.

  Attributes:
    source: a run, one of its checkpoints, or a model directory.
    out: a JSON file that is written, too.
    context: tokens that a model sees at once: documents are covered by windows
      of this many; None: as many as the model was trained to see.
    tokenizer: `bytes`, or the path of a tokenizer.json; None: the model's own.
    batch_size: rows at once; None: as the run has on its devices.
    dtype: of activations and matrix products; None: the run's; that of a model
      directory is float32 on a CPU, and elsewhere the model's.
    texts: to be evaluated on.
    tasks: of lm-eval, in place of texts; needs the extra `eval`.
    mesh: of devices.
  """

  source: tyro.conf.Positional[
    Annotated[pathlib.Path, tyro.conf.arg(metavar="RUN_OR_DIR")]
  ]
  out: pathlib.Path | None = None
  context: int | None = None
  tokenizer: str | None = None
  batch_size: int | None = None
  dtype: str | None = None
  texts: tyro.conf.OmitArgPrefixes[TextOptions] = TextOptions()
  tasks: tyro.conf.OmitArgPrefixes[TaskOptions] = TaskOptions()
  mesh: MeshSizes = dataclasses.field(default_factory=MeshSizes)

  @property
  def windows(self) -> bool:
    """Whether documents are covered by windows."""
    return self.context is not None or self.texts.stride is not None

  def check(self) -> None:
    """Raises ConfigError for options that do not go together."""
    texts, tasks = self.texts, self.tasks
    for field in dataclasses.fields(texts if tasks.tasks else tasks):
      option = "--" + field.name.replace("_", "-")
      if tasks.tasks and getattr(texts, field.name) != field.default:
        raise ConfigError(
          f"{option} is for texts, and --tasks for tasks; evaluate them one"
          " after the other."
        )
      if not tasks.tasks and getattr(tasks, field.name) != field.default:
        raise ConfigError(f"{option} is for tasks; give --tasks.")
    if texts.rows is not None and self.windows:
      raise ConfigError(
        "--rows is for packed rows; --stride and --context cover documents,"
        " whose number --max-tokens bounds."
      )
    if texts.max_tokens is not None and not self.windows:
      raise ConfigError(
        "--max-tokens is for windows (--stride, --context); give --rows for"
        " packed rows."
      )
    check_counts(
      rows=None if texts.rows == "all" else texts.rows,
      context=self.context,
      batch_size=self.batch_size,
      limit=tasks.limit,
      max_new_tokens=tasks.max_new_tokens,
    )
    if tasks.num_fewshot is not None and tasks.num_fewshot < 0:
      raise ConfigError(
        f"--num-fewshot is {tasks.num_fewshot}; it must be at least 0."
      )


@dataclasses.dataclass(frozen=True)
class Plan:
  """Everything that is known before a parameter is loaded.

  Attributes:
    subject: the model.
    batch_size: rows at once.
    placed: how it lies on its mesh, for each text; one for all tasks.
    texts: that it is evaluated on.
    tasks: that it is evaluated on.
    notes: what one should know to read the results.
  """

  subject: Subject
  batch_size: int
  placed: list[PlacedModel]
  texts: list[Text]
  tasks: Tasks | None
  notes: list[str]


def prepare(options: Options) -> Plan:
  """Whatever can be wrong, before any work.

  Raises:
    ConfigError: for models, texts, tasks, meshes or an output that cannot be
      used.
  """
  options.check()
  check_json_file(options.out, "--out")
  (subject,) = find_subjects([options.source])
  batch_size = options.batch_size or default_batch_size([subject])
  tasks = None
  texts: list[Text] = []
  if options.tasks.tasks:
    configs = [_task_config(options, subject)]
    tasks = load_tasks(options.tasks.tasks, options.tasks.include_path)
    length = configs[0].sequence_length
    tasks.bound_generation(options.tasks.max_new_tokens, length)
  else:
    texts = [
      _open_text(options, subject, name)
      for name in options.texts.data or (None,)
    ]
    configs = [
      dataclasses.replace(text.config, sequence_length=text.length)
      for text in texts
    ]
  placed = [
    place_model(
      *(subject, config, batch_size, options.mesh),
      dtype=options.dtype if subject.run else dtype_here(options.dtype),
    )
    for config in configs
  ]
  seen = subject.stored.context
  notes = [
    f"a context of {length} tokens is more than the {seen} that the model was"
    " trained to see."
    for length in sorted({config.sequence_length for config in configs})
    if seen is not None and length > seen
  ]
  return Plan(subject, batch_size, placed, texts, tasks, notes)


def _open_text(options: Options, subject: Subject, name: str | None) -> Text:
  """A data set, or with None what the run reads."""
  if name is None and subject.run is None:
    raise ConfigError(
      "a model directory names no data set; give --data, the directory of a"
      " data set, files of text as paths with a '/', or one of deltajax's own."
    )
  length = own_length(name) if name else None
  if length is None and subject.run is None:
    length = options.context
  config = common_data(
    [subject],
    {
      "dataset": name,
      "data_dir": options.texts.data_dir,
      "tokenizer": options.tokenizer,
      "sequence_length": length,
    },
  )
  texts = options.texts
  coverage: Rows | Strides
  if options.windows:
    context = options.context or subject.stored.context
    context = context or config.sequence_length
    stride = context if texts.stride is None else texts.stride
    coverage = Strides(context, stride, texts.max_tokens)
  else:
    rows = None if texts.rows == "all" else texts.rows
    validates = name is None and texts.split in (None, "validation")
    if texts.rows is None and validates and subject.run is not None:
      rows = subject.run.training.eval_sequences
    coverage = Rows(rows)
  split = texts.split
  if name is None and split is None:
    split = "validation"
  return open_text(config, split, coverage)


def _task_config(options: Options, subject: Subject) -> DataConfig:
  """Says how texts of tasks are encoded, and how long they can be."""
  config = common_data(
    [subject],
    {
      "dataset": "tasks",
      "tokenizer": options.tokenizer,
      "sequence_length": options.context or subject.stored.context,
    },
  )
  get_tokenizer(config.tokenizer).eos_id  # noqa: B018 (raises if none is known)
  return config


def parse(arguments: list[str]) -> Options:
  """Parses the command line."""
  usage = (
    "python -m train.evaluate  RUN_OR_DIR [--data PATH ... | --tasks NAME ...]"
    " [--out FILE]"
  )
  return parse_options(Options, usage, arguments, about=about_of(__doc__))


def command(arguments: list[str]) -> None:
  """Evaluates, prints what was found, and writes it down."""
  options = parse(arguments)
  plan = prepare(options)
  for note in plan.notes:
    print(f"note      {note}")
  print(f"model     {plan.subject.stored}")
  placed = plan.placed[0]
  params = plan.subject.stored.load(placed.abstract_params()).params
  found: dict[str, Any]
  if plan.tasks is None:
    found = {"texts": score_texts(plan, params)}
  else:
    found = score_tasks(options, plan, params)
    print("\n".join(results.task_lines(found)))
  if options.out is not None:
    values = results.describe(
      plan.subject, params, placed.config.dtype, notes=plan.notes, **found
    )
    write_json_file(options.out, values)
    print(f"results   {options.out}")


def score_texts(plan: Plan, params: Any) -> list[dict[str, Any]]:
  """Evaluates on texts, and prints each result as it comes."""
  found = []
  for text, placed in zip(plan.texts, plan.placed, strict=True):
    print(f"data      {text}")
    scorer = Scorer(placed.config, placed.sharding)
    begin = time.perf_counter()
    quality = text.score(scorer, params, plan.batch_size)
    seconds = time.perf_counter() - begin
    print("\n".join(results.quality_lines(text, quality)))
    found.append(results.text_values(text, quality, seconds))
  return found


def score_tasks(options: Options, plan: Plan, params: Any) -> dict[str, Any]:
  """Evaluates on tasks."""
  from deltajax.evaluation.harness import HarnessLM

  (placed,) = plan.placed
  assert plan.tasks is not None
  lm = HarnessLM(
    placed.config,
    params,
    get_tokenizer(placed.data.tokenizer),
    context=placed.data.sequence_length,
    batch_size=plan.batch_size,
    sharding=placed.sharding,
  )
  return run_tasks(
    lm,
    plan.tasks,
    limit=options.tasks.limit,
    num_fewshot=options.tasks.num_fewshot,
  )


if __name__ == "__main__":
  main(command, resumes=False)

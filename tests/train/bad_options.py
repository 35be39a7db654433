"""Command lines, options, machines and data that cannot be used."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Bad:
  """A command line that is refused.

  Attributes:
    line: what follows `python -m train.`.
    value: what cannot be used, as the message names it.
    remedy: what the message says would be right.
    process: needs a process of its own, since JAX counts devices once.
  """

  line: str
  value: str
  remedy: str
  process: bool = False


PRETRAIN = "pretrain TINY --workdir OUT"
QUICK = "pretrain configs/quickstart.py --workdir OUT"
AHEAD = "compile_ahead configs/quickstart.py --topology"
BUILD = (
  "prepare_data build OUT --tokenizer bytes --sequence-length 32 --sources"
)

COMMAND_LINES = {
  "no config": Bad("pretrain", "CONFIG", "lists all options of a config"),
  "no file": Bad(
    "pretrain configs/quickstrat.py --workdir OUT",
    *("'configs/quickstrat.py'", "did you mean 'configs/quickstart.py'"),
  ),
  "not Python": Bad(
    "pretrain README.md --workdir OUT",
    *("README.md is no Python file", "like configs/quickstart.py"),
  ),
  "syntax": Bad(
    "pretrain SYNTAX --workdir OUT", "SYNTAX, line 1", "SyntaxError"
  ),
  "raises": Bad(
    "pretrain RAISES --workdir OUT",
    *("RAISES, line 2", "ZeroDivisionError: division by zero"),
  ),
  "no function": Bad(
    "pretrain NO_FUNCTION --workdir OUT",
    *("NO_FUNCTION defines no get_config()", "see configs/quickstart.py"),
  ),
  "no RunConfig": Bad(
    "pretrain NO_CONFIG --workdir OUT", "returns dict", "not RunConfig"
  ),
  "of compare": Bad(
    "pretrain COMPARISON --workdir OUT",
    *("returns Comparison", "it is for python -m train.compare"),
  ),
  "of study": Bad(
    "compare STUDY --out OUT",
    "returns Study",
    "it is for python -m train.study",
  ),
  "of finetune": Bad(
    "pretrain configs/finetune_smollm2.py --workdir OUT",
    *("takes a model", "for python -m train.finetune"),
  ),
  "of pretrain": Bad(
    "finetune configs/quickstart.py --init-from MODEL --workdir OUT",
    *("quickstart.py takes no model", "configs/finetune_smollm2.py"),
  ),
  "unknown option": Bad(
    f"{QUICK} --model.widht 4", "--model.widht", "--model.width"
  ),
  "no value": Bad(f"{QUICK} --model.width", "--model.width", "Expected 1"),
  "no number": Bad(
    f"{QUICK} --model.width big", "'big'", "is not a whole number"
  ),
  "no whole number": Bad(
    f"{QUICK} --model.width 1.5", "'1.5'", "is not a whole number"
  ),
  "twice": Bad(
    f"{QUICK} --mesh.data 2 --mesh.data=5", "--mesh.data", "give it once"
  ),
  "twice, of evaluate": Bad(
    "evaluate RUN --stride 2 --stride 3 --out OUT",
    *("--stride is given twice", "give it once"),
  ),
  "subcommand": Bad(
    "convert imprt QWEN3 OUT", "'imprt'", "did you mean 'import'"
  ),
  "no subcommand": Bad("prepare_data", "{build,inspect}", "build --help"),
  "no topology": Bad(
    "compile_ahead configs/quickstart.py", "--topology", "required"
  ),
}

OPTIONS = {
  "variant": Bad(
    f"{QUICK} --model.routing.variant delta_blok",
    *("'delta_blok'", "did you mean 'delta_block'"),
  ),
  "blocks": Bad(
    f"{QUICK} --model.routing.num-blocks 9", "num_blocks is 9", "the 8 layers"
  ),
  "gate": Bad(
    f"{QUICK} --model.routing.gate scalar --model.routing.variant rd_tied",
    *("gate='scalar'", "needs an additive variant"),
  ),
  "heads of KV": Bad(
    f"{QUICK} --model.num-heads 3 --model.num-kv-heads 2",
    *("num_heads 3 is not divisible", "num_kv_heads 2"),
  ),
  "negative": Bad(f"{QUICK} --training.steps -5", "steps is -5", "positive"),
  "not finite": Bad(
    f"{QUICK} --optimizer.learning-rate nan", "is nan", "a finite float"
  ),
  "warm-up": Bad(
    f"{QUICK} --training.steps 50", "steps 50", "optimizer.warmup_steps 50"
  ),
  "accumulation": Bad(
    f"{QUICK} --training.accumulation 3", "batch_size 8", "accumulation 3"
  ),
  "weights": Bad(
    f"{QUICK} --data.mixture ./x --data.weights 0.5 0.6", "1.1", "sum to 1"
  ),
  "one weight": Bad(
    f"{QUICK} --data.weights 0.5 0.5", "2 numbers", "name 1 data sets"
  ),
  "dtype": Bad(f"{QUICK} --model.dtype bf16", "'bf16'", "mean 'bfloat16'"),
  "float64": Bad(
    f"{PRETRAIN} --model.dtype float64", "float64", "set JAX_ENABLE_X64=1"
  ),
  "float64 parameters": Bad(
    f"{PRETRAIN} --model.param-dtype float64",
    *("model.param_dtype is float64", "set JAX_ENABLE_X64=1"),
  ),
  "float64 ahead": Bad(
    f"{AHEAD} cpu:1 --model.dtype float64",
    *("model.dtype is float64", "set JAX_ENABLE_X64=1"),
  ),
  "hosts": Bad(
    f"{QUICK} --hosts.cluster explicit --hosts.count 2",
    *("hosts.cluster 'explicit'", "needs hosts.coordinator, hosts.index too"),
  ),
  "host": Bad(
    f"{QUICK} --hosts.cluster explicit --hosts.count 2 --hosts.index 2"
    " --hosts.coordinator localhost:1",
    *("hosts.index is 2", "it must be 0 to 1"),
  ),
  "accept": Bad(
    f"{QUICK} --training.accept model.width", "'model.width'", "--init-from"
  ),
  "accept nothing": Bad(
    f"{QUICK} --training.accept data.contents",
    *("'data.contents'", "did you mean 'data.content'"),
  ),
}

MACHINES = {
  "64 chips": Bad(
    "pretrain configs/paper_7_6b.py --workdir OUT",
    *("needs 64 devices; there are 1", "make one of them -1"),
  ),
  "devices": Bad(f"{PRETRAIN} --mesh.data 3", "needs 3 devices", "there are 1"),
  "two are left": Bad(
    f"{QUICK} --mesh.fsdp -1", "data and fsdp are -1", "only one can be"
  ),
  "no axis": Bad(f"{QUICK} --mesh.data 0", "mesh.data is 0", "or -1"),
  "batch by data": Bad(
    f"{AHEAD} cpu:8 --training.batch-size 12",
    *("batch_size / accumulation 12", "not divisible by data x fsdp 8"),
    process=True,
  ),
  "heads by tensor": Bad(
    f"{AHEAD} cpu:8 --mesh.data 2 --mesh.tensor 4",
    *("num_heads 2", "not divisible by tensor 4"),
    process=True,
  ),
  "sequence by context": Bad(
    f"{AHEAD} cpu:8 --mesh.data 2 --mesh.context 4 --data.sequence-length 130",
    *("sequence_length 130", "not divisible by context 4"),
    process=True,
  ),
  "topology": Bad(f"{AHEAD} v5p", "unknown topology 'v5p'", "v5p:4x4x4"),
  "axes": Bad(f"{AHEAD} v5p:4x4", "'v5p:4x4'", "3 axes, as in v5p:4x4x4"),
  "chip": Bad(f"{AHEAD} v5q:4x4x4", "'v5q'", "did you mean 'v5"),
  "report": Bad(
    f"{AHEAD} cpu:1 --json no/such/report.json",
    *("--json no/such/report.json", "there is no directory"),
  ),
  "attention": Bad(
    f"{PRETRAIN} --model.attention splash",
    *("attention 'splash' cannot serve", "it runs on tpu, the platform is cpu"),
  ),
  "depth attention": Bad(
    f"{PRETRAIN} --model.depth-attention pallas_triton",
    *("'pallas_triton' cannot serve", "it runs on gpu, the platform is cpu"),
  ),
}

DATA = {
  "data set": Bad(
    f"{PRETRAIN} --data.dataset python_stdlb",
    "'python_stdlb'",
    "mean 'python_st",
  ),
  "no data set": Bad(
    f"{PRETRAIN} --data.dataset no/such/place",
    *("there is no 'no/such/place'", "name a TFDS directory"),
  ),
  "sequence": Bad(
    f"{PRETRAIN} --data.sequence-length 999999",
    "1000000",
    "use a sequence_length of at most",
  ),
  "vocabulary": Bad(
    f"{PRETRAIN} --model.vocab-size 100",
    "vocab_size is 100",
    "259 ids; use at least",
  ),
  "batch": Bad(
    f"{PRETRAIN} --training.batch-size 99999", "batch_size 99999", "larger than"
  ),
  "tokenizer": Bad(
    f"{PRETRAIN} --data.tokenizer byte", "'byte'", "did you mean 'bytes'"
  ),
  "no tokenizer": Bad(
    f"{PRETRAIN} --data.tokenizer no/such", "no/such", "name a tokenizer.json"
  ),
  "packed for another length": Bad(
    f"{PRETRAIN} --data.dataset PREPARED",
    *("sequence_length of 20", "that of the run is 32. Change it"),
  ),
  "no sources": Bad(f"{BUILD} no/such", "no/such", "does not exist"),
  "empty directory": Bad(f"{BUILD} NO_FILES", "NO_FILES", "no file"),
  "empty file": Bad(f"{BUILD} NOTHING", "nothing.jsonl", "is an empty file"),
  "column": Bad(f"{BUILD} COLUMNS", "unknown column 'text'", "content, number"),
  "column of numbers": Bad(
    f"{BUILD} COLUMNS --column number", "'number' holds int64", "not text"
  ),
  "torn parquet": Bad(f"{BUILD} TORN", "TORN cannot be read", "as parquet"),
  "broken line": Bad(
    f"{BUILD} BROKEN", "BROKEN:4: no JSON", "bad_records 'skip'"
  ),
  "not UTF-8": Bad(
    f"{BUILD} NOT_UTF8", "byte 0xff at 5", "invalid_utf8 'replace'"
  ),
  "long document": Bad(
    f"{BUILD} LONG --max-document-bytes 1000", "1000", "bad_records 'skip'"
  ),
  "kind": Bad(f"{BUILD} TEXTS --kind jsnl", "'jsnl'", "did you mean 'jsonl'"),
  "fractions": Bad(
    f"{BUILD} TEXTS --validation 0.7 --test 0.5",
    *("validation 0.7 and test 0.5", "together they must be below 1"),
  ),
  "split without rows": Bad(
    f"{BUILD} TEXTS --validation 0.0001", "split 'validation'", "no document"
  ),
  "no manifest": Bad(
    "prepare_data inspect tests", "tests is no", "it has no manifest.json"
  ),
  "nothing prepared": Bad(
    "prepare_data inspect no/such", "no/such is no", "prepared data set"
  ),
  "rows to show": Bad(
    "prepare_data inspect PREPARED --rows -1", "--rows is -1", "at least 1"
  ),
  "characters to show": Bad(
    "prepare_data inspect PREPARED --characters -5",
    *("--characters is -5", "at least 1"),
  ),
  "occupied": Bad(
    "prepare_data build OCCUPIED --tokenizer bytes --sequence-length 32"
    " --sources TEXTS",
    *("OCCUPIED", "name"),
  ),
}

"""Models, runs, prompts, tasks and comparisons that cannot be used."""

from tests.train.bad_options import Bad

FINETUNE = "finetune configs/finetune_smollm2.py --workdir OUT"
EVALUATE = "evaluate RUN --out OUT"
ANALYZE = "analyze RUN --out OUT"
GENERATE = "generate RUN --prompt a"
COMPARE = "compare COMPARISON --out OUT"
IMPORT = "convert import"
EXPORT = "convert export QWEN3 OUT"

MODELS = {
  "no directory": Bad(
    f"{IMPORT} no/such OUT", "no/such", "there is no directory"
  ),
  "in place": Bad(f"{IMPORT} QWEN3 QWEN3", "QWEN3", "name another directory"),
  "missing shard": Bad(
    f"{IMPORT} MISSING_SHARD OUT",
    *("model-00002-of-00005.safetensors", "lacks 1 of the 5 files"),
  ),
  "truncated": Bad(
    f"{IMPORT} TRUNCATED OUT", "model.safetensors", "copy or download it again"
  ),
  "absent tensor": Bad(
    f"{IMPORT} ABSENT_TENSOR OUT",
    "model.absent.weight",
    "do not fit its config",
  ),
  "head_dim": Bad(
    f"{IMPORT} HEAD_DIM OUT", "head_dim 4", "do not fit its config"
  ),
  "model type": Bad(f"{IMPORT} GPT2 OUT", "'gpt2'", "Valid: "),
  "rope": Bad(f"{IMPORT} YARN OUT", "'yarn'", "Valid: default, llama3"),
  "large tokenizer": Bad(
    f"{IMPORT} LARGE_TOKENIZER OUT",
    *("ids up to 98", "the tokenizer belongs to another model"),
  ),
  "pickle": Bad(f"{IMPORT} PICKLED OUT", "pytorch_model.bin", "as safetensors"),
  "gate of a replacement": Bad(
    f"{IMPORT} QWEN3 OUT --routing.variant attnres_block --routing.gate scalar",
    *("routing.gate='scalar'", "needs an additive variant"),
  ),
  "variant of import": Bad(
    f"{IMPORT} QWEN3 OUT --routing.variant delta_blok",
    *("'delta_blok'", "did you mean 'delta_block'"),
  ),
  "blocks of import": Bad(
    f"{IMPORT} QWEN3 OUT --routing.variant delta_block",
    *("num_blocks is 4", "more than the 3 layers"),
  ),
  "routed already": Bad(
    f"{IMPORT} ROUTED OUT --routing.variant delta",
    "delta_block",
    "only a standard",
  ),
  "dtype of import": Bad(
    f"{IMPORT} QWEN3 OUT --param-dtype int8", "'int8'", "Valid: bfloat16"
  ),
  "no model": Bad(
    "convert export train OUT", "train is neither", "a model directory"
  ),
  "layout": Bad(
    f"{EXPORT} --layout hf", "'hf'", "Valid: deltajax, huggingface"
  ),
  "dtype of export": Bad(f"{EXPORT} --dtype int8", "'int8'", "Valid: bfloat16"),
  "occupied export": Bad(
    "convert export QWEN3 OCCUPIED", "'mine.txt'", "an empty or new directory"
  ),
  "export over a file": Bad(
    "convert export QWEN3 FILE_THERE", "FILE_THERE is a file", "not a directory"
  ),
  "own variant": Bad(
    "convert export ROUTED OUT", "'delta_block'", "layout 'deltajax'"
  ),
  "no init-from": Bad(FINETUNE, "--init-from is missing", "a model directory"),
  "no base": Bad(
    f"{FINETUNE} --init-from=no/such", "no/such", "there is no directory"
  ),
  "not a base": Bad(
    f"{FINETUNE} --init-from configs", "configs", "neither a model directory"
  ),
  "freeze": Bad(
    f"{FINETUNE} --init-from MODEL --data.dataset CORPUS --data.tokenizer bytes"
    " --freeze base",
    *("freeze", "nothing would learn"),
  ),
  "another shape": Bad(
    f"{FINETUNE} --init-from MODEL --data.dataset CORPUS --data.tokenizer bytes"
    " --model.num-layers 9",
    *("9 in the config", "model.num_layers: 2 there"),
  ),
  "routing on the way": Bad(
    f"{FINETUNE} --init-from MODEL --data.dataset CORPUS --data.tokenizer bytes"
    " --model.routing.variant delta",
    *("delta", "python -m train.convert import"),
  ),
}

RUNS = {
  "another run": Bad(
    "pretrain TINY --workdir RUN --training.seed 5",
    *("training.seed: 0 in the run, 5 now", "Name another directory"),
  ),
  "a file": Bad(
    "pretrain TINY --workdir FILE_THERE",
    "FILE_THERE is a file",
    "not a directory",
  ),
  "other files": Bad(
    "pretrain TINY --workdir OCCUPIED", "OCCUPIED", "name an empty or new one"
  ),
  "no run": Bad(
    "generate no/such --prompt a", "no/such", "there is no directory"
  ),
  "no checkpoint": Bad(
    "generate WITHOUT_CHECKPOINTS --prompt a",
    *("WITHOUT_CHECKPOINTS", "no complete checkpoint"),
  ),
  "no such checkpoint": Bad(
    "generate RUN/checkpoints/7 --prompt a",
    "checkpoints/7",
    "there is no directory",
  ),
}

PROMPTS = {
  "none": Bad("generate RUN", "no prompt", "give --prompt or --prompt-file"),
  "empty": Bad(
    "generate RUN --prompt a --prompt ''",
    "prompt 2 is empty",
    "at least one token",
  ),
  "no prompt file": Bad(
    "generate RUN --prompt-file no/such",
    "--prompt-file no/such",
    "No such file",
  ),
  "long": Bad(
    f"generate RUN --prompt {'a' * 40}", "40 tokens", "a prompt can have 31"
  ),
  "top-p": Bad(f"{GENERATE} --top-p 2", "top_p is 2.0", "must be"),
  "top-k": Bad(f"{GENERATE} --top-k 0", "top_k is 0", "at least 1"),
  "temperature": Bad(
    f"{GENERATE} --temperature -1", "temperature is -1", "at least 0"
  ),
  "stop": Bad(
    f"{GENERATE} --stop ''", "--stop is empty", "every text would end"
  ),
  "new tokens": Bad(
    f"{GENERATE} --max-new-tokens 0", "max_new_tokens is 0", "at least 1"
  ),
  "dtype": Bad(
    f"{GENERATE} --dtype float31", "'float31'", "did you mean 'float32'"
  ),
  "float64": Bad(
    f"{GENERATE} --dtype float64", "dtype is float64", "set JAX_ENABLE_X64=1"
  ),
  "tokenizer": Bad(f"{GENERATE} --tokenizer byte", "'byte'", "mean 'bytes'"),
  "tokenizer of another": Bad(
    "generate SMALL --prompt a --tokenizer bytes",
    *(
      "the model is 100, but the tokenizer has 259 ids",
      "belongs to the model",
    ),
  ),
}

EVALUATIONS = {
  "no data set": Bad("evaluate MODEL --out OUT", "no data set", "give --data"),
  "data set": Bad(
    f"{EVALUATE} --data python_stdlb", "'python_stdlb'", "mean 'python_stdlib'"
  ),
  "no texts": Bad(
    f"{EVALUATE} --data ./no.txt", "there is no 'no.txt'", "or files of text"
  ),
  "split": Bad(
    f"{EVALUATE} --split validaton", "'validaton'", "mean 'validation'"
  ),
  "empty": Bad(
    f"{EVALUATE} --data EMPTY --rows all",
    "hold no text",
    "1 documents, all empty",
  ),
  "empty documents": Bad(
    f"{EVALUATE} --data EMPTY --stride 8", "EMPTY", "there is no text"
  ),
  "other tokenizer": Bad(
    f"{EVALUATE} --tokenizer TOKENIZER",
    "tokenizer 'bytes'",
    "its own tokenizer",
  ),
  "packed otherwise": Bad(
    "evaluate LMEVAL --data PREPARED --out OUT",
    *("fingerprint 'bytes'", "prepare the corpus again"),
  ),
  "vocabulary": Bad(
    "evaluate SMALL --data CORPUS --tokenizer bytes --out OUT",
    *("vocabulary of small is 100", "the tokenizer that belongs to the model"),
  ),
  "stride": Bad(
    f"{EVALUATE} --context 16 --stride 17",
    "stride is 17",
    "from 1 to the context",
  ),
  "no stride": Bad(f"{EVALUATE} --stride 0", "stride is 0", "from 1"),
  "context": Bad(f"{EVALUATE} --context 0", "--context is 0", "at least 1"),
  "rows": Bad(f"{EVALUATE} --rows 0", "--rows is 0", "at least 1"),
  "rows and all": Bad(f"{EVALUATE} --rows most", "most", "INT|{all}"),
  "rows of windows": Bad(
    f"{EVALUATE} --rows 2 --stride 2", "--rows", "--max-tokens"
  ),
  "tokens of rows": Bad(
    f"{EVALUATE} --max-tokens 9", "--max-tokens", "give --rows"
  ),
  "few tokens": Bad(
    f"{EVALUATE} --stride 9 --max-tokens 1",
    "more than the 1",
    "at least as many",
  ),
  "batch": Bad(f"{EVALUATE} --batch-size 0", "--batch-size is 0", "at least 1"),
  "mesh": Bad(f"{EVALUATE} --mesh.data 3", "needs 3 devices", "there are 1"),
  "dtype": Bad(
    f"{EVALUATE} --dtype float31", "'float31'", "did you mean 'float32'"
  ),
  "float64": Bad(
    f"{EVALUATE} --dtype float64", "dtype is float64", "set JAX_ENABLE_X64=1"
  ),
  "both": Bad(
    f"{EVALUATE} --tasks piqa --stride 2", "--stride is for texts", "one after"
  ),
  "limit": Bad(f"{EVALUATE} --limit 2", "--limit is for tasks", "give --tasks"),
  "shots": Bad(
    f"{EVALUATE} --tasks piqa --num-fewshot -1",
    "--num-fewshot is -1",
    "at least 0",
  ),
  "generation": Bad(
    f"{EVALUATE} --include-path TASKS --tasks local_generate --context 9",
    *("10 tokens, and this one sees 9", "give --max-new-tokens"),
  ),
  "directory of tasks": Bad(
    f"{EVALUATE} --include-path no/such --tasks piqa",
    "no/such",
    "no such directory",
  ),
  "unknown task": Bad(
    f"{EVALUATE} --tasks hellaswg", "'hellaswg'", "the nearest are hellaswag"
  ),
  "no directory": Bad(
    "evaluate RUN --out no/such/x.json", "--out no/such/x.json", "no directory"
  ),
  "a directory": Bad(
    "evaluate RUN --out OCCUPIED", "OCCUPIED is a directory", "name a file"
  ),
}

ANALYSES = {
  "nothing": Bad("analyze --out OUT", "nothing to analyse", "name runs"),
  "no out": Bad("analyze RUN", "--out", "required"),
  "no model": Bad("analyze configs --out OUT", "configs", "neither a model"),
  "twice": Bad("analyze RUN RUN --out OUT", "RUN is given twice", "once"),
  "no data set": Bad("analyze MODEL --out OUT", "no data set", "give --data"),
  "other data": Bad(
    "analyze RUN SHORTER --out OUT",
    *("32 in run, 16 in shorter", "Give --context"),
  ),
  "no tokenizer": Bad(
    "analyze MODEL --data CORPUS --out OUT",
    *("there is no tokenizer at MODEL", "tokenizer.json"),
  ),
  "other tokenizer": Bad(
    f"{ANALYZE} --tokenizer TOKENIZER", "tokenizer 'bytes'", "its own tokenizer"
  ),
  "two tokenizers": Bad(
    "analyze RUN OTHER --context 32 --out OUT",
    *("other was trained with tokenizer", "its own tokenizer"),
  ),
  "rows": Bad(f"{ANALYZE} --rows 0", "--rows is 0", "at least 1"),
  "batch": Bad(f"{ANALYZE} --batch-size 0", "--batch-size is 0", "at least 1"),
  "mesh": Bad(f"{ANALYZE} --mesh.data 3", "needs 3 devices", "there are 1"),
  "split": Bad(
    f"{ANALYZE} --split validaton", "'validaton'", "mean 'validation'"
  ),
  "length": Bad(
    f"{ANALYZE} --context 99999999",
    "100000000",
    "use a sequence_length of at most",
  ),
  "dtype": Bad(f"{ANALYZE} --dtype float31", "'float31'", "mean 'float32'"),
  "float64": Bad(
    f"{ANALYZE} --dtype float64", "dtype is float64", "set JAX_ENABLE_X64=1"
  ),
  "other files": Bad(
    "analyze RUN --out OCCUPIED", "'mine.txt'", "an empty or new directory"
  ),
  "in a file": Bad(
    "analyze RUN --out FILE_THERE/out", "FILE_THERE", "cannot be written"
  ),
}

COMPARISONS = {
  "arm": Bad(f"{COMPARE} --arms tide", "'tide'", "did you mean 'tied'"),
  "missing seed": Bad(
    f"{COMPARE} --seeds 7 --report-only", "parent seed 7", "are not done"
  ),
  "seed": Bad(f"{COMPARE} --seeds 0 0", "(0, 0)", "Name each once"),
  "negative seed": Bad(
    f"{COMPARE} --seeds -1", "seed -1", "from 0 to 2**32 - 1"
  ),
  "data set": Bad(
    f"{COMPARE} --data.dataset no/such/place",
    *("there is no 'no/such/place'", "name a TFDS directory"),
  ),
  "stop": Bad(
    f"{COMPARE} --training.stop-after 3", "stop_after is 3", "Leave it out"
  ),
  "output": Bad(
    "compare COMPARISON --out FILE_THERE", "FILE_THERE", "not a directory"
  ),
  "study": Bad("study STUDY --out OUT --seeds 0 0", "(0, 0)", "Name each once"),
  "document": Bad(
    "study STUDY --out OUT --document FILE_THERE",
    *("FILE_THERE has no lines", "<!-- measured --> and <!-- end -->"),
  ),
  "no document": Bad(
    "study STUDY --out OUT --document no/such.md",
    "no/such.md",
    "cannot be read",
  ),
}

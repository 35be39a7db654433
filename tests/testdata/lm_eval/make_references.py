"""Makes what lies beside it: needs torch, transformers and lm-eval[hf].

    python tests/testdata/lm_eval/make_references.py

A tiny random Qwen3 of transformers with a tokenizer that puts <|start|> in
front of every text, the documents of the tasks, and what lm-eval's own model of
transformers finds on them, in float32 on a CPU: the figures of each task, and
the answer to each request.
"""

import json
import pathlib
import random
import shutil
import sys

import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
import tokenizers
import torch
import transformers

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from tests.testdata.huggingface.make_references import make_model  # noqa: E402

TASKS = ("local_choice", "local_last_word", "local_rolling", "local_generate")
CONTEXT = 48
WORDS = (
  *("the depth of a network", "routes", "every", "layer", "reads, and", "adds"),
  *("what it changed", "to the stream;", "then", "é", "model", "17", "attends"),
  *("over", "earlier sums", "softmax", "again", "and again", "(source)"),
)


def make_tokenizer() -> transformers.PreTrainedTokenizerFast:
  """Byte-level BPE of 300 ids."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False
  )
  made.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=300,
    special_tokens=["<|start|>", "<|end|>"],
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  made.train_from_iterator([" ".join(WORDS)] * 3, trainer)
  made.post_processor = tokenizers.processors.TemplateProcessing(
    single="<|start|> $A", special_tokens=[("<|start|>", 0)]
  )
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=made,
    bos_token="<|start|>",
    eos_token="<|end|>",
    pad_token="<|end|>",
  )


def random_text(rng: random.Random, least: int, most: int) -> str:
  return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


def continued(lm: HFLM, text: str, tokens: int) -> str:
  """What greedy search adds to a text."""
  ids = torch.tensor([lm.tok_encode(text)[-(CONTEXT - tokens) :]])
  found = lm.model.generate(ids, max_new_tokens=tokens, do_sample=False)
  return lm.tok_decode(found[0, ids.shape[1] :].tolist())


def make_documents(lm: HFLM) -> dict[str, list[dict]]:
  """Documents of each task; some texts are longer than the model sees."""
  rng = random.Random(0)
  choices, words, texts, starts = [], [], [], []
  for i in range(12):
    shared = {0: [" a", " b", " c"], 1: [" then", " the depth", " the model"]}
    options = shared.get(i % 3) or [random_text(rng, 1, 6) for _ in range(4)]
    choices.append(
      {
        "question": random_text(rng, 1, 20),
        "choices": options,
        "answer": rng.randrange(len(options)),
      }
    )
    text = random_text(rng, 1, 12) + (" " if i % 4 == 3 else "")
    # Half of them greedy search finds.
    word = continued(lm, text.rstrip(), 1 + i % 2)
    encoded = lm.tok_encode(text.rstrip() + word)
    found = lm.tok_encode(text.rstrip()) == encoded[: -1 - i % 2]
    if i % 2 or not word or not found:
      word = " " + rng.choice(WORDS)
    words.append({"text": text, "word": word})
    texts.append({"text": random_text(rng, 0, 40)})
  texts.append({"text": "<|start|>" + random_text(rng, 3, 3)})
  for i in range(8):
    text = random_text(rng, 1, 16)
    answer = continued(lm, text, 10) if i % 2 else "none"
    starts.append({"text": text, "answer": answer})
  return {
    "choice": choices,
    "last_word": words,
    "rolling": texts,
    "generate": starts,
  }


def reference_model() -> HFLM:
  return HFLM(
    pretrained=str(HERE / "model"),
    device="cpu",
    dtype="float32",
    batch_size=4,
  )


def run(lm: HFLM) -> dict:
  """What lm-eval finds: figures of tasks, and answers to requests."""
  found = lm_eval.simple_evaluate(
    lm,
    tasks=list(TASKS),
    task_manager=TaskManager(
      include_path=str(HERE / "tasks"), include_defaults=False
    ),
    bootstrap_iters=0,
  )
  return {
    "results": {
      task: {k: v for k, v in values.items() if "," in k and "stderr" not in k}
      for task, values in found["results"].items()
    },
    "responses": {
      task: [x["filtered_resps"] for x in samples]
      for task, samples in found["samples"].items()
    },
  }


def main() -> None:
  """Writes everything."""
  shutil.rmtree(HERE / "model", ignore_errors=True)
  config = transformers.Qwen3Config(
    vocab_size=300,
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=32,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=1,
  )
  make_model(config, seed=0).save_pretrained(HERE / "model")
  make_tokenizer().save_pretrained(HERE / "model")
  lm = reference_model()
  for name, documents in make_documents(lm).items():
    lines = [json.dumps(x, ensure_ascii=False) for x in documents]
    (HERE / "tasks" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
  found = run(lm)
  (HERE / "references.json").write_text(json.dumps(found, indent=1) + "\n")
  print(json.dumps(found["results"], indent=2))


if __name__ == "__main__":
  main()

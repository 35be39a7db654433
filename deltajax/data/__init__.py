"""Documents to batches: tokenizers, packing, TFDS builders, grain pipelines.

Deliberately imports nothing. numpy only is needed by `continuation`,
`manifest`, `mixing`, `packing`, `tokenizer_file`, `tokenizers` and `workers`;
the others need tensorflow_datasets (which is used without TensorFlow), and
`pipeline` grain.
"""

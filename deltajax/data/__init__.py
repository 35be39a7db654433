"""Documents to batches: tokenizers, packing, TFDS builders, grain pipelines.

Deliberately imports nothing: `deltajax.data.tokenizers` and
`deltajax.data.packing` need numpy only, the other modules need grain and
tensorflow_datasets (which is used without TensorFlow).
"""

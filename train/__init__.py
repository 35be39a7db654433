"""Commands, run from the repository root: python -m train.pretrain ..."""

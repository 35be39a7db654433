"""deltajax: transformers whose residual connections route over depth."""

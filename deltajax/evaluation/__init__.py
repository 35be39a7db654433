"""How well a model predicts text, and how it does on tasks."""

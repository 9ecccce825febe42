"""Shared parts of backends whose models return logits as tensors: summaries and draws."""

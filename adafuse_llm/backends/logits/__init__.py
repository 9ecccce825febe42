"""What backends whose models return logits as tensors share: summaries and draws."""

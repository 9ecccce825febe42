"""What backends whose models return logits as tensors share: summaries, draws and anchors."""

"""Measurements on checkpoints that others have trained."""

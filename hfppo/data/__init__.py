"""Prompts of a dataset, or of a stream."""

"""Prompts: of a dataset, or of one that is read while the run goes on."""

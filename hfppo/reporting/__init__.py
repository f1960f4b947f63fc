"""Reports of a run: log file, curves, progress, completions, health warnings and model card."""

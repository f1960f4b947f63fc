"""What a run reports: log file, curves, progress, completions, health warnings and model card."""

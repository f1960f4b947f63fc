"""Rank completions by the critic that a run has trained."""

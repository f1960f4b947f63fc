"""Samplers: from prompts to completions."""

from hfppo.generation.sampler import Completions, Sampler, completions_from, eos_token_ids
from hfppo.generation.transformers import TransformersSampler

__all__ = ["Completions", "Sampler", "TransformersSampler", "completions_from", "eos_token_ids"]

"""From prompts to a `Rollout`: the first half of PPO."""

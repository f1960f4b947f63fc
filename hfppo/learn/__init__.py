"""From a `Rollout` to optimizer steps: the second half of PPO."""

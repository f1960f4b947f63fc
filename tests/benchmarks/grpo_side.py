"""A side of `grpo.py`, which starts it."""

import json
import sys
from pathlib import Path

import ppo_grpo
import ppo_hfppo
from ppo_workload import WORKLOADS, distinct_characters, load

if __name__ == "__main__":
    workload_name, side, given, rollouts, models = sys.argv[1:]
    workload, folder, fields = WORKLOADS[workload_name], Path(models), json.loads(given)
    policy = load(workload, folder, "policy", False)
    if side == "TRL":
        work = (workload, folder, policy, distinct_characters, int(rollouts))
        measured = ppo_grpo.measure(*work, fields["num_generations"], takes_turns=True)
    else:
        critic = fields.pop("critic") or "adapter"  # which `grpo` does not build
        work = (workload, folder, fields, policy, distinct_characters, critic, int(rollouts))
        measured = ppo_hfppo.measure(*work, takes_turns=True)
    print(json.dumps(measured))

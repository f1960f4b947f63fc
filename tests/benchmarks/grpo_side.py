"""A side of `grpo.py`, which starts it."""

import json
import sys
from pathlib import Path

import ppo_grpo
import ppo_hfppo
from ppo_workload import WORKLOADS, distinct_characters, load

from hfppo.generation import key_values
from hfppo.models import layout

if __name__ == "__main__":
    workload_name, given, group, rollouts, models = sys.argv[1:]
    workload, folder, num_generations = WORKLOADS[workload_name], Path(models), int(group)
    policy = load(workload, folder, "policy", False)
    everything = (workload, folder, policy, distinct_characters, int(rollouts))
    if given == "TRL":
        measured = ppo_grpo.measure(*everything, num_generations, takes_turns=True)
    else:
        fields = json.loads(given)
        critic = fields.pop("critic", "adapter")
        if not fields.pop("share_prompts", True):
            layout.SHARING_ATTENTION, key_values.ATTENTION = "none", ()
        fields["num_generations"] = num_generations
        measured = ppo_hfppo.measure(workload, folder, fields, *everything[2:4], critic, everything[4], True)
    print(json.dumps(measured))

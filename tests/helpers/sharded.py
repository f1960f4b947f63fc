"""Run by test_sharding.py under torchrun: trains with FSDP2 or ZeRO on CPUs and resumes; writes JSON.

torchrun … sharded.py FOLDER CRITIC ENGINE FIELDS [FOLDER of another run, to resume it]
"""

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from torch.distributed.tensor import DTensor

from helpers.processes import freeze_imports
from helpers.runs import SMALL, count_digits, untimed_logs
from helpers.tiny import LORA, ragged_model
from hfppo import ActorCritic, PPOConfig, PPOTrainer, TokenTraceCallback
from hfppo.models import layout, output_head
from hfppo.reporting.run_page import RunPageCallback
from hfppo.reporting.traces import read_traces, trace_file

freeze_imports()
OUT, CRITIC, ENGINE, FIELDS = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
PRIVILEGED = CRITIC == "privileged"
# accelerate shards over GPUs alone, though torch and DeepSpeed can over CPUs as well.
KINDS = dict.fromkeys(("fsdp2", "fsdp2 of 1", "fsdp2 of 4", "hsdp"), "MULTI_GPU")
KINDS |= dict.fromkeys(("zero2", "zero3"), "DEEPSPEED")
CONFIG = {
    **SMALL,
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_mini_batches": 1, "max_steps": 4},
    **{"save_strategy": "steps", "save_steps": 1, "logging_steps": 1, "kl_loss_coef": 0.1, "entropy_coef": 0.01},
    **{"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4},
    "local_rollout_forward_batch_size": 1,
    **FIELDS,
}
DATASET = Dataset.from_list([{"prompt": f"{'请问' * a}{a}+{b}="} for a in range(4) for b in range(3, 7)])

TOLD = DATASET.map(lambda row: {"critic_prompt": f"请问{row['prompt']}"})


def make(name: str) -> PPOTrainer:
    args = PPOConfig(**CONFIG, output_dir=str(OUT / name))
    if ENGINE in KINDS:
        args.device  # noqa: B018 (makes the state that is changed next)
        PartialState._shared_state["distributed_type"] = DistributedType[KINDS[ENGINE]]
    trainer = PPOTrainer(
        model=str(OUT / "base") if CONFIG.get("use_vllm") else ragged_model(),
        reward_funcs=count_digits,
        args=args,
        train_dataset=TOLD if PRIVILEGED else DATASET,
        eval_dataset=DATASET.select(range(7)),  # does not divide by two
        processing_class=character_tokenizer(),
        peft_config=LORA,
        critic="adapter" if PRIVILEGED else CRITIC,
        callbacks=[TokenTraceCallback(every=1)],
    )
    trainer.remove_callback(RunPageCallback)  # half of the time of so small a run
    return trainer


saved: list[dict] = []  # what each model was saved from
save_pretrained = ActorCritic.save_pretrained


def recorded(self, *args, state_dict, **kwargs):
    saved.append(state_dict)
    save_pretrained(self, *args, state_dict=state_dict, **kwargs)


def logs(trainer: PPOTrainer) -> list[dict[str, float]]:
    return [entry for entry in untimed_logs(trainer) if "loss" in entry or "eval_reward" in entry]


# Another number of forwards on each process, which a sharded model must not follow.
layout.CPU_TOKENS = 12 * (1 + int(os.environ["RANK"]))
output_head.tokens_at_once = lambda vocab_size, device: 3
ActorCritic.save_pretrained = recorded
straight = make("straight")
straight.evaluate()
straight.train()
straight.save_model(str(OUT / "end"))
resumed = make("resumed")
resumed.train(resume_from_checkpoint=str(Path([OUT, *sys.argv[5:]][-1]) / "straight" / "checkpoint-1"))
traces = [vars(trace) for trace in read_traces(trace_file(straight.args.output_dir, 2))]
sharded = next((p for p in straight.model.parameters() if isinstance(p, DTensor)), None)
result = {
    "engine": str(straight.accelerator.distributed_type),
    "straight": logs(straight),
    "resumed": logs(resumed),
    "traces": traces,
    "saved": sorted({name for state in saved for name in state or ()}),
    "trained": sorted(name for name, p in straight.model.named_parameters() if p.requires_grad),
    "placements": str(getattr(sharded, "placements", None)),
    "best": straight.state.best_model_checkpoint,
}
(OUT / f"result_{straight.args.process_index}.json").write_text(json.dumps(result))
straight.end()

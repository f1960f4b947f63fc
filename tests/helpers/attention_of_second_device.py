"""Run by test_two_processes.py on the second device: trains with an attention that raises on the CPU; prints JSON.

python second_device.py LIBRARY attention_of_second_device.py FOLDER
"""

import json
import sys
from pathlib import Path

from build_arithmetic_base import character_tokenizer
from datasets import Dataset

from helpers.attention import register_attention
from helpers.runs import SMALL, count_digits
from helpers.tiny import LORA, ragged_model
from hfppo import PPOConfig, PPOTrainer
from hfppo.models import layout
from hfppo.reporting.run_page import RunPageCallback

OUT = Path(sys.argv[1])
NAME = "second_only"

layout.PACKING_ATTENTION = NAME  # packed rows are tried as well
seen = register_attention(NAME, lambda query: query.device.type == "second")
ragged_model().save_pretrained(OUT / "base")
attention = {"attn_implementation": NAME}
trainer = PPOTrainer(
    model=str(OUT / "base"),
    reward_funcs=count_digits,
    args=PPOConfig(
        **{**SMALL, "use_cpu": False},
        output_dir=str(OUT / "out"),
        model_init_kwargs=attention,
    ),
    train_dataset=Dataset.from_list([{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]),
    processing_class=character_tokenizer(),
    peft_config=LORA,
    critic=str(OUT / "base"),
)
before = len(seen)
trainer.remove_callback(RunPageCallback)
trainer.train()
packed = {type(model).__name__: all(found.values()) for model, found in layout._packs.items()}
print(json.dumps({"before": before, "devices": sorted(set(seen)), "packed": packed}))

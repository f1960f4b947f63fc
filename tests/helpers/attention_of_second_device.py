"""Run by test_two_processes.py on the second device: trains with an attention that raises on the CPU; prints JSON.

python second_device.py LIBRARY attention_of_second_device.py FOLDER
"""

import json
import sys
from pathlib import Path

from helpers.attention import register_attention
from helpers.runs import PROMPTS, small_trainer
from helpers.tiny import ragged_model
from hfppo.models import layout
from hfppo.reporting.run_page import RunPageCallback

OUT = Path(sys.argv[1])
NAME = "second_only"

layout.PACKING_ATTENTION = NAME  # packed rows are tried as well
seen = register_attention(NAME, lambda query: query.device.type == "second")
ragged_model().save_pretrained(OUT / "base")
trainer = small_trainer(
    OUT / "out",
    {"use_cpu": False, "model_init_kwargs": {"attn_implementation": NAME}},
    model=str(OUT / "base"),
    train_dataset=PROMPTS,
    critic=str(OUT / "base"),
)
before = len(seen)
trainer.remove_callback(RunPageCallback)
trainer.train()
packed = {type(model).__name__: all(found.values()) for model, found in layout._packs.items()}
print(json.dumps({"before": before, "devices": sorted(set(seen)), "packed": packed}))

"""Runs a script whose CPU processes accelerate takes for GPUs, which alone it shards over.

    accelerate launch --config_file recipes/accelerate/zero3.yaml tests/helpers/cpus_as_gpus.py SCRIPT [ARGUMENT …]

Nothing else in accelerate, torch or DeepSpeed changes.
"""

import os
import runpy
import sys
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import DistributedType

KINDS = {"ACCELERATE_USE_FSDP": DistributedType.MULTI_GPU, "ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED}


def claim_gpus() -> None:
    """Make each PartialState of several CPU processes the kind that the launcher's engine needs."""
    initialize = PartialState.__init__

    def init(self, *args, **kwargs):
        initialize(self, *args, **kwargs)
        for variable, kind in KINDS.items():
            if os.environ.get(variable) == "true" and self.distributed_type == DistributedType.MULTI_CPU:
                self.distributed_type = kind

    PartialState.__init__ = init


if __name__ == "__main__":
    claim_gpus()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")

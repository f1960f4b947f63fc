"""Describe and compare the configurations of adapters."""

import json
from dataclasses import MISSING, asdict, fields, is_dataclass

from peft import PeftConfig

# Fields that a description always has.
USUAL_FIELDS = (
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern",
)  # fmt: skip
# Fields that say where an adapter comes from or runs; a description never has them.
ORIGIN_FIELDS = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "init_lora_weights", "eva_config", "corda_config", "loftq_config", "lora_ga_config", "runtime_config",
    "save_projection",
)  # fmt: skip


def describe_adapter(config: PeftConfig) -> dict[str, object]:
    """Return, as JSON values, the fields that decide whether an adapter's weights fit and mean the same.

    Apart from the usual fields it has the fields that are not at their default, so a field that PEFT adds later
    changes no checkpoint.
    """
    described = {name: getattr(config, name, None) for name in USUAL_FIELDS}
    for f in fields(config):
        default = f.default if f.default_factory is MISSING else f.default_factory()
        value = getattr(config, f.name)
        starts = f.name == "init_weights" and isinstance(value, bool)  # a string may change the forward
        if value != default and f.name not in ORIGIN_FIELDS and not f.name.endswith("dropout") and not starts:
            described[f.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return json.loads(json.dumps(described, default=lambda x: sorted(x) if isinstance(x, set) else str(x)))


def find_differences(before: object, now: object) -> tuple[object, object]:
    """Return only the parts of two JSON values that differ, comparing dicts and lists by entry.

    A missing dict key counts as None.
    """
    if isinstance(before, list) and isinstance(now, list):
        return [x for x in before if x not in now], [x for x in now if x not in before]
    if not isinstance(before, dict) or not isinstance(now, dict):
        return before, now
    names = [name for name in {**now, **before} if before.get(name) != now.get(name)]
    pairs = {name: find_differences(before.get(name), now.get(name)) for name in names}
    return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}

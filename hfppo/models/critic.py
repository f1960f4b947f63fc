"""The critic: a value head on an adapter on the actor's base, on the actor's hidden states, or on another model."""

import copy
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hfppo.models.adapter_config import describe_adapter, find_differences
from hfppo.models.layout import Layout, hidden_states, trunk_of
from hfppo.models.loading import adapter_config, check_placement, fit_to_model, hub_options, keep_four_bits
from hfppo.models.lower_layers import names_in_top_layers, start_from
from hfppo.models.vocabulary import is_resized, saved_vocabulary

CRITIC_FOLDER = "critic"
CRITIC_WEIGHTS = "critic.safetensors"
CRITIC_CONFIG = "critic_config.json"
# LoRA on the actor's base; the actor's hidden states; the same without a gradient to the actor.
CRITIC_KINDS = ("adapter", "shared", "shared_detached")


class ValueHead(nn.Linear):
    """A linear head that computes values in float32, also where DeepSpeed or FSDP2 gives its weights in bfloat16."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (…,) values of (…, H) hidden states."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class Critic(nn.Module):
    """A value head, on a trunk of its own or on the actor's hidden states.

    Args:
        kind: one of `CRITIC_KINDS`, or "model" (LoRA on another model).
        trunk: hidden states from token ids, or None for the actor's.
        hidden_size: width of the hidden states.
        base: name of the separate model, kept in the saved folder.
        layers: with "adapter", how many layers it adapts, the top ones; None: all.
    """

    def __init__(
        self,
        kind: str,
        trunk: nn.Module | None,
        hidden_size: int,
        base: str | None = None,
        layers: int | None = None,
    ):
        super().__init__()
        self.kind, self.base, self.hidden_size = kind, base, hidden_size
        self.layers = layers
        self.detach = kind == "shared_detached"  # keeps the value loss from the actor's weights
        self.trunk = trunk
        self.value_head = ValueHead(hidden_size)

    def forward(self, actor_hidden: Tensor | None, layout: Layout, base_states: Tensor | None = None) -> Tensor:
        """Return the (N,) values of a layout's positions, from its inputs or from the actor's (N, H) hidden states.

        Args:
            base_states: (…, L, H), the base's states below the layers that the critic adapts, to start from.
        """
        if base_states is not None:
            assert self.trunk is not None
            assert self.layers is not None
            with start_from(self.trunk, self.layers, base_states):
                hidden = hidden_states(self.trunk, layout)
        elif self.trunk is not None:
            if self.kind == "model":  # its vocabulary may be padded less than the actor's
                size = cast(Any, self.trunk).config.get_text_config().vocab_size
                known = layout.inputs["input_ids"].clamp(max=size - 1)
                layout = replace(layout, inputs={**layout.inputs, "input_ids": known})
            hidden = hidden_states(self.trunk, layout)
        else:
            hidden = actor_hidden.detach() if self.detach else actor_hidden
        return self.value_head(hidden)

    def save(self, folder: str | Path, state_dict: dict[str, Tensor]) -> None:
        """Write the trainable weights of this critic's state dict, and the configuration that they fit.

        Resized embeddings of a separate model are written too, because its own folder has others.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        saved = self.trained_names() | self.resized_names()
        weights = {name: tensor.contiguous() for name, tensor in state_dict.items() if name in saved}
        save_file(weights, Path(folder) / CRITIC_WEIGHTS)
        (Path(folder) / CRITIC_CONFIG).write_text(json.dumps(self.config(), indent=2) + "\n")

    def trained_names(self) -> set[str]:
        """Return the names of the trainable parameters, which are saved."""
        return {name for name, parameter in self.named_parameters() if parameter.requires_grad}

    def resized_names(self) -> set[str]:
        """Return the names of a separate model's frozen embeddings if they were resized after it was loaded."""
        base: Any = self.trunk.get_base_model() if isinstance(self.trunk, PeftModel) else None
        if self.kind != "model" or not is_resized(base, None):
            return set()
        embeddings = {id(parameter) for parameter in base.get_input_embeddings().parameters()}
        return {name for name, parameter in self.named_parameters() if id(parameter) in embeddings}

    def config(self) -> dict[str, Any]:
        """Return the configuration that is saved beside the weights and compared when they are loaded."""
        adapter = describe_adapter(self.trunk.active_peft_config) if isinstance(self.trunk, PeftModel) else None
        own = {"kind": self.kind, "base": self.base, "hidden_size": self.hidden_size, "peft_config": adapter}
        return own if self.layers is None else {**own, "layers": self.layers}

    def load(self, folder: str | Path) -> None:
        """Read what `save` wrote.

        Raises:
            ValueError: the folder holds no critic, or one of another kind, size or adapter.
        """
        if not (Path(folder) / CRITIC_WEIGHTS).is_file():
            raise ValueError(
                f"{folder} has no {CRITIC_WEIGHTS}; it holds no critic, so take another folder or checkpoint"
            )
        saved = json.loads((Path(folder) / CRITIC_CONFIG).read_text())
        own = self.config()
        for name in ("kind", "hidden_size", "peft_config"):
            its, ours = find_differences(saved[name], own[name])
            if its != ours:
                raise ValueError(
                    f"{folder} holds a critic of {name} {its!r} that does not fit this run's {ours!r} critic; use the "
                    "critic and the peft_config it was trained with"
                )
        weights: dict[str, Any] = load_file(Path(folder) / CRITIC_WEIGHTS)
        # Earlier versions wrote no embeddings.
        if other := sorted((weights.keys() ^ self.trained_names()) - self.resized_names()):
            raise ValueError(
                f"{folder} holds a critic of other layers than this run's: {other[0]} is only in one of them; use the "
                "base, the critic and the peft_config it was trained with"
            )
        # Like load_state_dict, but each process takes its shards where the critic is sharded.
        options = StateDictOptions(full_state_dict=True, strict=False)  # frozen weights are not in the file
        set_model_state_dict(self, weights, options=options)


@dataclass(frozen=True)
class CriticSource:
    """What a critic is built from."""

    model: str | PreTrainedModel  # one of CRITIC_KINDS, or a loaded model
    folder: Path | None = None  # of its trained weights
    layers: int | None = None  # of an adapter: how many layers it adapts; None: all

    def with_layers(self, layers: int | None, critic: Any, model: PreTrainedModel | PeftModel) -> "CriticSource":
        """Return the source of a critic that adapts this many layers.

        Args:
            layers: `critic_layers`.
            critic: the argument of that name, for errors.
            model: the actor's.
        Raises:
            ValueError: it is no adapter, a saved one adapts another number, or the model has not more layers.
        """
        if self.folder is not None and self.layers != layers:
            raise ValueError(
                f"critic_layers={layers}, and the critic of critic={critic!r} was trained with critic_layers="
                f"{self.layers}; set critic_layers={self.layers}"
            )
        if layers is not None and self.model != "adapter":
            raise ValueError(
                f"critic_layers={layers} is for critic='adapter', which shares the actor's base, and critic is "
                f"{critic if isinstance(critic, str) else type(critic).__name__!r}; leave critic_layers out"
            )
        if layers is not None and layers >= (count := model.config.get_text_config().num_hidden_layers):
            raise ValueError(
                f"critic_layers={layers} are not fewer than the model's {count} layers; lower it, or leave it out, "
                "which adapts all of them"
            )
        return replace(self, layers=layers)


def find_critic(critic: str | PreTrainedModel | CriticSource, **init_kwargs: Any) -> CriticSource:
    """Resolve the `critic` argument, and load the model if it names one.

    Args:
        init_kwargs: of `from_pretrained`; a saved critic's base gets them without `revision`, which is the critic's.
    Raises:
        TypeError, ValueError: `critic` is none of these, or cannot be loaded.
    """
    if isinstance(critic, CriticSource):
        return critic
    if isinstance(critic, PreTrainedModel) or critic in CRITIC_KINDS:
        return CriticSource(critic)
    if not isinstance(critic, str):
        raise TypeError(
            f"critic is of type {type(critic).__name__}, not {', '.join(map(repr, CRITIC_KINDS))}, a model, or the id "
            "or path of one; of a model with an adapter save merge_and_unload(), and give the folder"
        )
    options = hub_options(init_kwargs)
    if (folder := find_saved_critic(critic, **options)) is not None:
        saved = json.loads((folder / CRITIC_CONFIG).read_text())
        of_base = {name: value for name, value in init_kwargs.items() if name != "revision"}
        base = saved["base"] if saved["kind"] == "model" else saved["kind"]
        model = find_critic(base, **of_base).model
        if isinstance(model, PreTrainedModel):
            weights = {name.removeprefix("trunk."): x for name, x in load_file(folder / CRITIC_WEIGHTS).items()}
            if (size := saved_vocabulary(cast(PreTrainedModel, model.base_model), weights)) is not None:
                model.resize_token_embeddings(size, mean_resizing=False)
        return CriticSource(model, folder, saved.get("layers"))
    if adapter_config(critic, **options) is not None:
        raise ValueError(f"critic={critic!r} is an adapter; merge it into its base, save that, and give its folder")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            critic, **{"num_labels": 1, **init_kwargs}, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"critic={critic!r} is not {', '.join(map(repr, CRITIC_KINDS))}, a folder or repository with a saved "
            f"critic, or the id or path of a model: {error}"
        ) from error
    if any(name.startswith("score") for name in info["missing_keys"]):
        nn.init.zeros_(model.score.weight)  # a causal language model has no such head; the new one would be random
    return CriticSource(model)


def find_saved_critic(name: str, **options: Any) -> Path | None:
    """Find a saved critic in this folder, in its `critic/`, or else in `critic/` of a repository of the Hub.

    Args:
        options: as `hub_options` returns them.
    """
    for folder in (Path(name), Path(name) / CRITIC_FOLDER):
        if (folder / CRITIC_CONFIG).is_file():
            return folder
    if Path(name).is_dir():
        return None
    try:
        config = hf_hub_download(name, f"{CRITIC_FOLDER}/{CRITIC_CONFIG}", **options)
    except (OSError, ValueError):  # no repository, none that can be reached, or one without a critic
        return None
    hf_hub_download(name, f"{CRITIC_FOLDER}/{CRITIC_WEIGHTS}", **options)
    return Path(config).parent


def build_critic(source: CriticSource, base: PreTrainedModel, peft_config: PeftConfig) -> Critic:
    """Build the critic, before an adapter is put on the base."""
    # Some models project their states to another width before the head.
    width = getattr(base.get_output_embeddings(), "in_features", base.config.get_text_config().hidden_size)
    if isinstance(source.model, PreTrainedModel):
        check_placement("critic", source.model)
        built = critic_from_model(source.model, peft_config)
    elif source.model != "adapter":
        built = Critic(source.model, None, width).to(base.device)
    else:
        trunk = add_adapter(shared_copy(base), peft_config, source.layers)
        built = Critic("adapter", trunk, width, layers=source.layers)
    if source.folder is not None:
        built.load(source.folder)
    return built


def critic_from_model(model: PreTrainedModel, peft_config: PeftConfig) -> Critic:
    """A critic on another model, for instance the reward model, whose score head the value head starts from."""
    keep_four_bits(model)  # before its first forward
    trunk = add_adapter(shared_copy(model), peft_config)  # the model itself may be the reward model as well
    score = getattr(model, "score", None)
    width = getattr(score, "in_features", model.config.get_text_config().hidden_size)
    built = Critic("model", trunk, width, base=model.config.name_or_path)
    if isinstance(score, nn.Linear) and score.out_features == 1:
        with torch.no_grad():
            built.value_head.weight.copy_(score.weight)
    return built


def add_adapter(model: PreTrainedModel, peft_config: PeftConfig, layers: int | None = None) -> PeftModel:
    """Put an adapter like the actor's on a model's trunk.

    Args:
        layers: how many to adapt, the top ones and nothing else; None: all that the actor's adapts.
    """
    config: Any = fit_to_model(peft_config, model)
    config.task_type = None
    config.init_lora_weights = True  # others need the base's weights, and here only names are found
    # PEFT resolves the target modules, also "all-linear" with experts.
    tuner: Any = get_peft_model(shared_copy(model), config, low_cpu_mem_usage=True).base_model
    config = copy.deepcopy(tuner.peft_config["default"])
    config.init_lora_weights = getattr(peft_config, "init_lora_weights", True)
    config.modules_to_save = config.base_model_name_or_path = None
    # The trunk has no output head to tie to the embeddings; PEFT has put the names into attributes that are no fields.
    config.ensure_weight_tying, config.modules_to_tie, config.target_modules_to_tie = False, None, None
    config.inference_mode = False
    modules = names_inside_trunk(model, tuner.targeted_module_names)
    parameters = names_inside_trunk(model, tuner.targeted_parameter_names)
    if layers is not None:
        modules, parameters = (names_in_top_layers(names, trunk_of(model), layers) for names in (modules, parameters))
        config.trainable_token_indices = None
        if not modules and not parameters:
            raise ValueError(
                f"critic_layers={layers} leaves the critic no weight to train: peft_config adapts nothing in the top "
                f"{layers} layers; raise critic_layers, or let peft_config adapt them"
            )
    config.target_modules = modules
    if parameters:
        config.target_parameters = sorted(parameters)
    config.layers_to_transform = config.layers_pattern = config.exclude_modules = None  # the targets are by full names
    trunk = re.compile(rf"^(\^?){re.escape(trunk_name(model) or model.base_model_prefix)}\\?\.")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, name, None) or {}
        setattr(config, name, {trunk.sub(r"\1", pattern): value for pattern, value in patterns.items()})
    return get_peft_model(cast(PreTrainedModel, trunk_of(model)), config, adapter_name="critic")


def names_inside_trunk(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Return the names inside a model's trunk, relative to the trunk."""
    trunk = f"{trunk_name(model)}.".lstrip(".")
    return [name.removeprefix(trunk) for name in names if name.startswith(trunk)]


def trunk_name(model: PreTrainedModel) -> str:
    """Return the name of a model's trunk among its modules; empty for a trunk."""
    return next(name for name, module in model.named_modules() if module is trunk_of(model))


def shared_copy(module: nn.Module) -> Any:
    """Copy a module tree but not its tensors, so that an adapter on one tree does not touch the other."""
    keep_four_bits(module)  # or a forward of the copy would rewrite what the other computes with
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, memo={id(tensor): tensor for tensor in tensors})

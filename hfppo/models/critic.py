"""The critic: a value head on an adapter on the actor's base, on the actor's hidden states, or on another model."""

import copy
import json
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download
from peft import PeftConfig, PeftModel, get_peft_config, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.error import NoMatchingPeftModuleError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from hfppo.functional import ValueRange
from hfppo.models.adapter_config import describe_adapter, find_differences
from hfppo.models.adapter_switch import CRITIC
from hfppo.models.layout import trunk_of
from hfppo.models.loading import NO_CODE, adapter_config, check_placement, fit_to_model, hub_options, keep_four_bits
from hfppo.models.lower_layers import find_layers, replace_lowest
from hfppo.models.modes import attributes
from hfppo.models.vocabulary import is_resized
from hfppo.support.refusals import raise_first

CRITIC_FOLDER = "critic"
CRITIC_WEIGHTS = "critic.safetensors"
CRITIC_CONFIG = "critic_config.json"
# LoRA on the actor's base; the actor's hidden states; the same without a gradient to the actor.
CRITIC_KINDS = ("adapter", "shared", "shared_detached")
# Fields that say which layers an adapter is on. Names and shapes of a critic's weights say it too.
PLACES = (
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "ensure_weight_tying", "rank_pattern",
)  # fmt: skip


class ValueHead(nn.Linear):
    """A linear head that computes values in float32, even if DeepSpeed or FSDP2 gives its weights in bfloat16."""

    def __init__(self, hidden_size: int):
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (…,) values of (…, H) hidden states."""
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(-1)


class Critic(nn.Module):
    """A value head on hidden states: the actor's, those of the base with an adapter of its own, or another model's.

    Args:
        source: its kind, layers, bounds and prompts.
        hidden_size: width of the hidden states.
        peft_config: the configuration of the critic's adapter; None: the critic reads the actor's states.
        trunk: the other model without its head, with the adapter; None: the critic is on the actor's base.
    """

    def __init__(
        self, source: "CriticSource", hidden_size: int, peft_config: PeftConfig | None, trunk: PeftModel | None = None
    ):
        super().__init__()
        self.kind, self.layers, self.bounds = source.kind, source.layers, source.bounds
        self.privileged, self.has_own_adapter = source.privileged, bool(source.peft_config and peft_config)
        self.hidden_size, self.peft_config, self.trunk = hidden_size, peft_config, trunk
        self.value_head = ValueHead(hidden_size)

    @property
    def is_shared(self) -> bool:
        """Whether the critic reads the actor's hidden states."""
        return self.peft_config is None

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the head's (…,) outputs for (…, H) hidden states, which `values` bounds.

        "shared_detached" keeps the value loss from the actor.
        """
        return self.value_head(hidden.detach() if self.kind == "shared_detached" else hidden)

    def values(self, outputs: Tensor) -> Tensor:
        """Return the values of the head's outputs, in their shape."""
        return outputs if self.bounds is None else self.bounds.values(outputs)

    def token_values(self, outputs: Tensor, mask: Tensor, final: bool) -> dict[str, Tensor]:
        """Return what `TokenOutputs` has about values, by its names.

        Args:
            outputs: (B, T + 1), the head's before each token and after the last one.
            mask: (B, T) bool, the completion mask.
            final: whether to return the value after the last token.
        """
        values = self.values(outputs)
        found = {"values": values[:, :-1].where(mask, 0.0)}
        if final:
            found["final_value"] = values[:, -1]
        if self.bounds is not None and self.bounds.link == "sigmoid":
            found["value_logits"] = outputs[:, :-1].where(mask, 0.0)
        return found

    def readable(self, ids: Tensor) -> Tensor:
        """Return token ids that another model knows; its vocabulary may be padded less than the actor's."""
        return ids if self.trunk is None else ids.clamp(max=self.trunk.config.get_text_config().vocab_size - 1)

    def check_columns(self, columns: Container[str]) -> None:
        """Raise ValueError unless there is a column "critic_prompt" just if the critic was trained with it."""
        if self.privileged != ("critic_prompt" in columns):
            advice = "pass an entry for each prompt" if self.privileged else "leave it out"
            trained = "with it, and its values mean nothing without" if self.privileged else "without it"
            raise ValueError(f"critic_prompt: the critic was trained {trained}; {advice}")

    def config(self) -> dict[str, Any]:
        """Return the configuration that is saved next to the weights and compared when they are loaded."""
        adapter = None if self.peft_config is None else describe_adapter(self.peft_config)
        base = None if self.trunk is None else self.trunk.config.name_or_path
        own = {"kind": self.kind, "base": base, "hidden_size": self.hidden_size, "peft_config": adapter}
        more = {"layers": self.layers, "value_range": self.bounds and self.bounds._asdict()}
        more |= {name: getattr(self, name) or None for name in ("has_own_adapter", "privileged")}
        return own | {name: x for name, x in more.items() if x is not None}

    def save(self, folder: str | Path, weights: dict[str, Tensor]) -> None:
        """Write the critic's trained weights, by their names in the file, and the configuration that they fit."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, Path(folder) / CRITIC_WEIGHTS)
        (Path(folder) / CRITIC_CONFIG).write_text(json.dumps(self.config(), indent=2) + "\n", encoding="utf-8")

    def read(self, folder: str | Path, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the weights that `save` wrote.

        Args:
            names: of the critic's trained weights in the file.
        Raises:
            ValueError: the folder contains no critic, or a critic of another kind, size or adapter.
        """
        if not (Path(folder) / CRITIC_WEIGHTS).is_file():
            raise ValueError(
                f"{folder} has no {CRITIC_WEIGHTS}, so it contains no critic; choose another folder or checkpoint"
            )
        saved = json.loads((Path(folder) / CRITIC_CONFIG).read_text(encoding="utf-8"))
        its, ours = find_differences(comparable(saved), comparable(self.config()))
        if its != ours:
            raise ValueError(
                f"{folder} contains a critic with {its}, but this run's critic has {ours}; use the critic, "
                "critic_layers, value_range, value_loss, peft_config, critic_peft_config and column critic_prompt it "
                "was trained with"
            )
        weights = load_file(Path(folder) / CRITIC_WEIGHTS)
        if other := sorted(weights.keys() ^ set(names)):
            raise ValueError(
                f"{folder} contains a critic of other layers: this run's and the saved one differ in {other[0]}; "
                "use the base, the critic and the peft_config it was trained with"
            )
        return weights


def comparable(config: dict[str, Any]) -> dict[str, object]:
    """Return a critic's configuration without its base's name and without the adapter's `PLACES`."""
    adapter = config["peft_config"] or {}
    return {**config, "base": None, "peft_config": {name: x for name, x in adapter.items() if name not in PLACES}}


@dataclass(frozen=True)
class CriticSource:
    """What a critic is built from."""

    model: str | PreTrainedModel  # one of CRITIC_KINDS, or a loaded model
    folder: Path | None = None  # the folder of its trained weights
    layers: int | None = None  # number of top layers that an "adapter" critic adapts; None: all
    bounds: ValueRange | None = None  # the range of the values; None: no bound
    peft_config: PeftConfig | None = None  # of its adapter; None: as the actor's
    privileged: bool = False  # whether it reads the column "critic_prompt"

    @property
    def kind(self) -> str:
        """One of `CRITIC_KINDS`, or "model" (LoRA on another model)."""
        return self.model if isinstance(self.model, str) else "model"

    @property
    def is_shared(self) -> bool:
        """Whether the critic reads the actor's hidden states."""
        return self.kind in ("shared", "shared_detached")

    def config_for(self, base: PreTrainedModel, actors: PeftConfig) -> PeftConfig | None:
        """Return the configuration of the critic's adapter, by default as the actor's; None without an adapter."""
        if self.is_shared:
            return None
        model = base if isinstance(self.model, str) else self.model
        config: Any = fit_to_model(self.peft_config or actors, model)
        config.task_type = config.base_model_name_or_path = None
        # Trained all the same: some methods of PEFT allow one adapter that says so.
        config.inference_mode, config.ensure_weight_tying = True, False
        if self.layers is not None:
            config.trainable_token_indices = None
        return config

    def check(self, actor: PreTrainedModel | PeftModel) -> None:
        """Raise ValueError unless layers, prompts and the kind of the critic fit each other and the actor."""
        count = actor.config.get_text_config().num_hidden_layers
        given = f"critic={self.kind!r}" if self.layers is None else f"critic_layers={self.layers}"
        raise_first(
            {
                f"{given} is for critic='adapter', which shares the actor's base, but critic is {self.kind!r}; leave "
                "critic_layers out": self.layers is not None and self.kind != "adapter",
                f"{given} must be below the model's {count} layers; lower it, or leave it out to adapt all of them": (
                    self.layers is not None and self.layers >= count
                ),
                f"train_dataset has a column 'critic_prompt', but with {given} the critic starts from states of the "
                "actor's prompt; use critic='adapter' without critic_layers, or remove the column": (
                    self.privileged and (self.is_shared or self.layers is not None)
                ),
            }
        )


def find_critic(critic: str | PreTrainedModel | CriticSource, **init_kwargs: object) -> CriticSource:
    """Resolve the `critic` argument, and load the model if it names one.

    Args:
        init_kwargs: keywords of `from_pretrained`; `revision` is a saved critic's own, not its base's.
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
            "or path of one; save a PeftModel's merge_and_unload(), and give the folder"
        )
    options = hub_options(init_kwargs)
    if (folder := find_saved_critic(critic, **options)) is not None:
        saved = json.loads((folder / CRITIC_CONFIG).read_text(encoding="utf-8"))
        of_base = {name: value for name, value in init_kwargs.items() if name != "revision"}
        base = saved["base"] if saved["kind"] == "model" else saved["kind"]
        bounds = ValueRange(**saved["value_range"]) if "value_range" in saved else None
        adapter = {name: x for name, x in (saved.get("peft_config") or {}).items() if x is not None}
        config = get_peft_config(adapter) if saved.get("has_own_adapter") else None
        model, privileged = find_critic(base, **of_base).model, saved.get("privileged", False)
        return CriticSource(model, folder, saved.get("layers"), bounds, config, privileged)
    if adapter_config(critic, **options) is not None:
        raise ValueError(f"critic={critic!r} is an adapter; merge it into its base, save that, and give its folder")
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            critic, **{"num_labels": 1, **NO_CODE, **init_kwargs}, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"critic={critic!r} is not {', '.join(map(repr, CRITIC_KINDS))}, a folder or repository with a saved "
            f"critic, or the id or path of a model: {error}"
        ) from error
    if any(name.startswith("score") for name in info["missing_keys"]):
        nn.init.zeros_(model.score.weight)  # a causal language model has no such head, and the new one is random
    return CriticSource(model)


def find_saved_critic(name: str, **options: Any) -> Path | None:
    """Find a saved critic in this folder, in its `critic/`, or else in `critic/` of a repository of the Hub.

    Args:
        options: the output of `hub_options`.
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


def build_critic(source: CriticSource, base: PreTrainedModel, peft_config: PeftConfig | None) -> Critic:
    """Build the critic with new weights; the adapter of an "adapter" critic is on the base already.

    On another model, for instance the reward model, the value head starts from the score head. Values in a range start
    in its middle: a score is no output of their head.

    Args:
        peft_config: from `CriticSource.config_for`.
    Raises:
        ValueError: the model's layers are spread over devices, or another model's embeddings were resized.
    """
    model = base if isinstance(source.model, str) else source.model
    check_placement("critic", model)
    if model is base:
        return Critic(source, width_of(base.get_output_embeddings(), base), peft_config).to(base.device)
    head = getattr(model, "score", None)
    model.config.return_dict = True  # outputs are read by name
    if is_resized(model, None):
        raise ValueError(
            f"critic has another vocabulary than {model.config.name_or_path!r}, but a saved run loads it from there; "
            "save it with save_pretrained, and give that folder"
        )
    copied = shared_copy(model).requires_grad_(False)
    with only_adaptable(copied, None):
        trunk = get_peft_model(copied, cast(PeftConfig, peft_config), adapter_name=CRITIC)
    trunk.set_requires_grad(CRITIC)
    trunk.base_model.model = trunk_of(copied)
    built = Critic(source, width_of(head, model), peft_config, trunk)
    built.value_head.to(base.device)
    if isinstance(head, nn.Linear) and head.out_features == 1 and source.bounds is None:
        with torch.no_grad():
            built.value_head.weight.copy_(head.weight)
    return built


def width_of(head: nn.Module | None, model: PreTrainedModel) -> int:
    """Return the width of a head's inputs; some models project their states to another width before the head."""
    return getattr(head, "in_features", model.config.get_text_config().hidden_size)


@contextmanager
def only_adaptable(model: PreTrainedModel, top: int | None) -> Iterator[None]:
    """Let a critic's adapter, which is put on the model in the block, be in its trunk only, or in the top layers only.

    `peft_config` names the modules of a whole model. So the others are taken out for the block.

    Raises:
        ValueError: the top layers have no module that the adapter adapts.
    """
    trunk = trunk_of(model)
    heads = {name: x for name, x in model.named_children() if trunk is not model and trunk not in x.modules()}
    layers = nn.ModuleList() if top is None else find_layers(trunk)
    below = replace_lowest(layers, len(layers) - (top or 0), nn.Identity())
    try:
        # Without an output head there are no weights to tie.
        with attributes(model, _tied_weights_keys=None, **dict.fromkeys(heads)), below:
            yield
    except NoMatchingPeftModuleError as error:
        if top is None:
            raise
        raise ValueError(
            f"critic_layers={top} leaves the critic no weight to train, since peft_config adapts no module of these "
            "layers; raise critic_layers, or add their modules to target_modules"
        ) from error
    of_layers = set(layers.modules())
    for name, module in list(trunk.named_modules()):
        if isinstance(module, ModulesToSaveWrapper):
            trunk.set_submodule(name, module.original_module)
        elif top is not None and isinstance(module, BaseTunerLayer) and module not in of_layers:
            trunk.set_submodule(name, cast(BaseTunerLayer, module).get_base_layer())


def shared_copy(module: nn.Module, own: Iterable[nn.Parameter] = ()) -> Any:
    """Copy a module tree but not its tensors, so that an adapter on one tree does not touch the other.

    Args:
        own: parameters that the copy gets copies of.
    """
    keep_four_bits(module)  # without this, a forward of the copy rewrites the shared weights
    copied = set(own)
    shared: list[object] = [*(x for x in module.parameters() if x not in copied), *module.buffers()]
    # bitsandbytes keeps the scales of 4-bit weights as separate tensors: 0.06 bytes per weight, unless quantized too.
    shared += [part.quant_state for part in module.modules() if hasattr(part, "quant_state")]
    return copy.deepcopy(module, memo={id(x): x for x in shared})

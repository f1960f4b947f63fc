"""Models and tokenizers as users give them."""

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftConfig, PeftModel, TaskType, load_peft_weights
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import CONFIG_NAME, INCLUDE_LINEAR_LAYERS_SHORTHAND, ModulesToSaveWrapper, get_peft_model_state_dict
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled, unset_hf_deepspeed_config

from hfppo.config import PPOConfig
from hfppo.models.vocabulary import saved_vocabulary

# Fields of an adapter's configuration that cannot be set, and the reason.
UNSUPPORTED = {
    "bias": "trains biases of the base, so the disabled adapter is not the reference policy",
    "layer_replication": "gives the model more layers, so the disabled adapter is not the reference policy",
    "monteclora_config": "draws noise, so two passes over one token disagree",
    "alora_invocation_tokens": "works in PEFT's whole forward only, and the passes here end before the output head",
}

# Arguments that name a model with its own tokenizer, each with the argument for another tokenizer.
TOKENIZER_ARGUMENTS = {"model": "processing_class", "reward_funcs": "reward_processing_classes"}

NO_CODE = {"trust_remote_code": False}  # by default transformers asks on the standard input

SCALED_BY_LENGTH = ("dynamic", "longrope")  # kinds of RoPE scaling that depend on the longest row

INSIDE_KERNEL = ("x_proj", "dt_proj", "out_proj")  # layers whose weights a state-space kernel reads by itself

NO_PRODUCT = ("Router", "Grouped")  # parts of the names of subclasses of nn.Linear that compute something else


def as_name(given: Any) -> Any:
    """Return a path as text, with the home folder in the place of "~"; anything else as it is."""
    return os.path.expanduser(given) if isinstance(given, str | os.PathLike) else given


@contextmanager
def load_whole(args: PPOConfig) -> Iterator[None]:
    """Make `from_pretrained` load complete weights in the block. Without this, it keeps shards under ZeRO-3.

    Adapters, heads and checks need the shapes and numbers. DeepSpeed shards the model when training begins, as FSDP2
    does, and it never gathers models outside it, such as a reward model.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        args.deepspeed_plugin.set_deepspeed_weakref()


def load_model(
    model: str | PreTrainedModel | PeftModel, argument: str = "model", **init_kwargs: object
) -> PreTrainedModel | PeftModel:
    """Load a base or an adapter from an id or path; a loaded model is returned, with named outputs.

    Args:
        argument: name of the argument that names the model, for errors.
    Raises:
        ValueError, RuntimeError: it cannot be loaded, or the adapter does not fit its base.
        TypeError: it is not a decoder-only language model.
    """
    loaded = load_named(model, argument, **init_kwargs) if isinstance(model, str) else model
    check_architecture(argument, loaded)
    loaded.config.return_dict = True  # outputs are read by name
    return loaded


def load_named(name: str, argument: str, **init_kwargs: object) -> PreTrainedModel | PeftModel:
    """Load a base or an adapter from an id or path."""
    options = hub_options(init_kwargs)
    if (config := adapter_config(name, **options)) is None:
        with name_in_errors(argument, name):
            return AutoModelForCausalLM.from_pretrained(name, **{**NO_CODE, **init_kwargs})
    base_name = str(config.base_model_name_or_path)
    with name_in_errors(f"the base of the adapter {argument}={name!r}, base_model_name_or_path", base_name):
        base = load_base_of(name, config, load_peft_weights(name, device="cpu", **options), **init_kwargs)
    loaded = PeftModel.from_pretrained(base, name, **options)
    loaded.active_peft_config.revision = base_revision(name, config, init_kwargs)
    return loaded


def load_base_of(
    adapter: str, config: PeftConfig, weights: dict[str, Tensor], **init_kwargs: object
) -> PreTrainedModel:
    """Load the base of an adapter, resized to the vocabulary that the adapter was trained with.

    Args:
        adapter: its folder or repository.
        config: the adapter's, which names the base.
        weights: the adapter's, by the names in its file; they replace the new rows.
        init_kwargs: keywords of the base's `from_pretrained`; `revision` is the adapter's own.
    """
    of_base = {**NO_CODE, **init_kwargs, "revision": base_revision(adapter, config, init_kwargs)}
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, **of_base)
    if (size := saved_vocabulary(base, weights)) is not None:
        base.resize_token_embeddings(size, mean_resizing=False)
    return base


def hub_options(init_kwargs: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that a tokenizer or adapter takes as well."""
    return {name: x for name, x in init_kwargs.items() if name in ("revision", "token", "cache_dir")}


def base_revision(adapter: str, config: PeftConfig, init_kwargs: Mapping[str, object]) -> str | None:
    """Return the revision of an adapter's base: the adapter's entry, or the requested one for a local adapter.

    For an adapter on the Hub, `revision` is the adapter's own revision, as in PEFT's AutoPeftModel. A base in a folder
    has no revision.
    """
    if Path(config.base_model_name_or_path or "").is_dir():
        return None
    return config.revision or (hub_options(init_kwargs).get("revision") if Path(adapter).is_dir() else None)


def adapter_config(name: str, **options: Any) -> PeftConfig | None:
    """Return the configuration of the adapter in a folder or, where there is no such folder, a repository of the Hub.

    None if there is no adapter.
    """
    if Path(name).is_dir() and not (Path(name) / CONFIG_NAME).is_file():
        return None  # without this, PEFT asks the Hub for a repository of that name
    try:
        return PeftConfig.from_pretrained(name, **options)
    except (ValueError, OSError):
        return None


@contextmanager
def name_in_errors(argument: str, name: str, advice: str = "correct the id or path, or load it") -> Iterator[None]:
    """Name the argument and its value if loading fails; offline, transformers' errors leave it out.

    Raises:
        ValueError: replaces an OSError or ValueError.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise ValueError(f"{argument}={name!r} cannot be loaded; {advice}: {error}") from error


def check_architecture(name: str, model: object) -> None:
    """Raise if a model is not a decoder-only language model, or if its layers are spread over devices.

    Heads and adapters are created on one device.

    Args:
        name: the argument's name in errors.
    Raises:
        TypeError: it is not a decoder-only language model.
        ValueError: its layers are on several devices.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    if not isinstance(inner, PreTrainedModel) or inner.config.is_encoder_decoder or not inner.can_generate():
        raise TypeError(
            f"{name} is of type {type(inner).__name__}, not a decoder-only language model of transformers; give one "
            "loaded by AutoModelForCausalLM, or its id or path"
        )
    check_placement(name, inner)


def check_placement(name: str, model: PreTrainedModel) -> None:
    """Raise if a model's layers are spread over several devices.

    Raises:
        ValueError: the layers are on several devices.
    """
    devices = sorted({str(device) for device in getattr(model, "hf_device_map", {}).values()})
    if len(devices) > 1:
        raise ValueError(
            f"{name} is spread over {', '.join(devices)} by its device_map; leave device_map out, take a quantized "
            "base, or shard it by FSDP2 or ZeRO-3, as docs/distributed.md says"
        )


def check_trainable(model: PreTrainedModel | PeftModel, peft_config: PeftConfig | None) -> None:
    """Raise if an adapter of the model cannot be trained, before the model is changed.

    Raises:
        ValueError: the disabled adapter is not the reference, or a second adapter is asked for.
    """
    if isinstance(model, PeftModel):
        if peft_config is not None:
            raise ValueError(
                "model is already an adapter, but peft_config asks for another; leave peft_config out to train this "
                "adapter further, or merge it into its base, save that, and give its folder"
            )
        check_adapter(model.active_peft_config)
        return
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):  # it acts in every forward and is not saved
            raise ValueError(
                f"model has an adapter in its layer {name}, from an earlier trainer, get_peft_model or an adapter's "
                "folder; load its base, or give the PeftModel or the name of that folder"
            )
    check_adapter(peft_config or default_peft_config())


def check_vocabulary(name: str, model: PreTrainedModel | PeftModel, needed: int) -> None:
    """Raise if the vocabulary of a reference or critic is too small.

    Raises:
        ValueError: the vocabulary has fewer than `needed` tokens.
    """
    if (size := model.config.get_text_config().vocab_size) < needed:
        raise ValueError(
            f"{name} has a vocabulary of {size} tokens, but the completions need {needed}; give a model with the same "
            "tokenizer"
        )


def positions_of(model: PreTrainedModel | PeftModel) -> tuple[int | None, str | None]:
    """Return a model's number of positions (None: unlimited), and the kind of scaling beyond them that is not used.

    A scaling that depends on the longest row is not used: a token's log-prob would depend on the other rows.
    """
    config = model.config.get_text_config()
    own = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    trained = rope.get("original_max_position_embeddings") or own
    if (kind := rope.get("rope_type")) in SCALED_BY_LENGTH:
        return trained, kind
    return own and max(own, int(trained * (rope.get("factor") or 1.0))), None


def check_adapter(config: PeftConfig) -> None:
    """Raise if an adapter draws noise, cannot be disabled, or cannot be saved for a language model.

    Raises:
        ValueError: a field or type that is not supported, another task type than CAUSAL_LM, or prompt learning.
    """
    for field, why in UNSUPPORTED.items():
        if (value := getattr(config, field, None)) not in (None, "none"):
            raise ValueError(f"{field}={value!r} {why}; leave it out of peft_config")
    if config.task_type not in (None, TaskType.CAUSAL_LM):
        kind = str(getattr(config.task_type, "value", config.task_type))
        raise ValueError(
            f"with task_type={kind!r} of peft_config, the saved adapter could not be loaded into a language model; "
            "use task_type='CAUSAL_LM'"
        )
    if config.peft_type == "PVERA":
        raise ValueError("PVeRA draws noise, so two passes over one token disagree; use VeRA or LoRA")
    if config.is_prompt_learning:
        raise ValueError(
            f"the model's or peft_config's type {getattr(config.peft_type, 'value', config.peft_type)} is prompt "
            "learning, which cannot be disabled to give the reference policy; use LoRA"
        )


def keep_four_bits(model: nn.Module) -> None:
    """Keep bitsandbytes from rewriting 4-bit weights; call it before the model's first forward.

    Without this, CPUs with AVX512-BF16 rewrite them for inference, in place and with their scales in bfloat16. The
    bytes then change, and passes with and without gradient, or of actor and reference, disagree.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def separate_adapter(
    model: PreTrainedModel | PeftModel, peft_config: PeftConfig | None, revision: str | None = None
) -> tuple[PreTrainedModel, PeftConfig, dict[str, Tensor] | None]:
    """Separate a model that passed `check_trainable` into base, adapter configuration and adapter weights, or None.

    A merged adapter is unmerged. Only the active one is kept, at the scale of its configuration. A base alone gets the
    configuration of a new adapter.

    Args:
        revision: a Hub base's commit or branch; a new adapter's configuration records it.
    """
    if not isinstance(model, PeftModel):
        config = copy.deepcopy(peft_config) or default_peft_config()
        if not Path(model.config.name_or_path).is_dir():
            config.revision = revision or config.revision
        return model, config, None
    config = copy.deepcopy(model.active_peft_config)
    config.inference_mode = False
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer) and layer.merged:
            layer.unmerge()
    weights = get_peft_model_state_dict(model, adapter_name=model.active_adapter)
    start = {name: tensor.clone() for name, tensor in weights.items()}
    wrapped = model.get_base_model().named_modules()
    originals = {name: module.original_module for name, module in wrapped if isinstance(module, ModulesToSaveWrapper)}
    base = model.unload()
    for name, module in originals.items():  # PEFT leaves the trained ones
        base.set_submodule(name, module)
    return base, config, start


def default_peft_config() -> LoraConfig:
    """Return LoRA of rank 16 on every linear layer except the output head; `fit_to_model` has the exceptions."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def fit_to_model(config: PeftConfig, model: PreTrainedModel) -> PeftConfig:
    """Return a copy of an adapter's configuration whose "all-linear" fits the model.

    It leaves out layers that no adapter can act on. PEFT takes every subclass of nn.Linear. Routers return a choice,
    and grouped layers multiply by blocks: Llama 4, Phi-MoE, DeepSeek V4. The kernels of a state-space layer read all
    weights but the first projection's by themselves, past an adapter. PEFT rejects some of them by name.

    It adds fused experts, which are parameters, not layers. PEFT adds them itself for some architectures only.
    """
    config = copy.deepcopy(config)
    experts = sorted({short_name(name) for name in expert_weights(model)})
    if experts and isinstance(config, LoraConfig):
        config.lora_dropout = 0.0  # dropout is off in training anyway, and PEFT refuses it on parameters
    targets, excluded = (getattr(config, name, None) for name in ("target_modules", "exclude_modules"))
    if str(targets).lower() != INCLUDE_LINEAR_LAYERS_SHORTHAND or isinstance(excluded, str):
        return config
    unfit = set(excluded or ())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "." in name:
            parent, child = name.split(".")[-2:]
            inside_kernel = child in INSIDE_KERNEL and is_state_space(model.get_submodule(name.rpartition(".")[0]))
            if inside_kernel or any(part in type(module).__name__ for part in NO_PRODUCT):
                unfit.add(f"{parent}.{child}")
    config.exclude_modules = sorted(unfit) or None  # type: ignore[attr-defined]
    if experts and isinstance(config, LoraConfig) and config.target_parameters is None:
        config.target_parameters = experts
    return config


def expert_weights(model: nn.Module) -> Iterator[str]:
    """Yield the names of a mixture's fused weights: all experts of a layer in one 3-dimensional parameter."""
    for path, module in model.named_modules():
        if "Experts" in type(module).__name__:
            yield from (f"{path}.{name}" for name, x in module.named_parameters(recurse=False) if x.ndim == 3)


def short_name(path: str) -> str:
    """Return the end of a weight's name that its layers have in common, as `target_parameters` compares it."""
    return ".".join(path.split(".")[-3:])


def is_state_space(module: nn.Module) -> bool:
    """Return whether a module is a selective state space, as Mamba's and Mamba 2's layers are."""
    return hasattr(module, "A_log") and hasattr(module, "D")


def load_tokenizer(
    model: str | PreTrainedModel | PeftModel, argument: str = "model", **init_kwargs: object
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, or its base's if an adapter was saved without one.

    Args:
        argument: name of the argument that names the model, for errors; one of `TOKENIZER_ARGUMENTS`.
        init_kwargs: keywords of the model's `from_pretrained`; location and `trust_remote_code` are used.
    Raises:
        ValueError: there is no tokenizer, or no such model.
    """
    name = model if isinstance(model, str) else model.config.name_or_path
    options = hub_options(init_kwargs)
    trusted = {"padding_side": "left", "trust_remote_code": bool(init_kwargs.get("trust_remote_code"))}
    advice = f"correct the id or path, save the tokenizer there, or give it in {TOKENIZER_ARGUMENTS[argument]}"
    with name_in_errors(f"the tokenizer of {argument}", name, advice):
        try:
            return AutoTokenizer.from_pretrained(name, **options, **trusted)
        except (ValueError, OSError):
            if (config := adapter_config(name, **options)) is None:
                raise
            of_base = {**options, "revision": base_revision(name, config, init_kwargs)}
            return AutoTokenizer.from_pretrained(config.base_model_name_or_path, **of_base, **trusted)

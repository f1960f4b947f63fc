"""Raise if an adapter writes into the base when it is made, or if a loaded one becomes another policy.

PEFT has some forty methods and adds more with each release, so they are tried, not listed.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.error import NoMatchingPeftModuleError
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from hfppo.models.loading import expert_weights, keep_four_bits, short_name
from hfppo.models.modes import eval_mode

SAMPLED = 4096  # numbers compared per weight; an adapter that writes into a weight changes nearly all of them
TOKENS = 8  # tokens of the text that two policies are compared on

logger = logging.getLogger(__name__)


@contextmanager
def unchanged(base: nn.Module, name: str) -> Iterator[None]:
    """Compare the base's weights before and after the block, in which the adapter is put on it.

    Args:
        name: the configuration's name in the error.
    Raises:
        ValueError: making the adapter changes the base, or it fits no layer.
    """
    before = [
        (module, weight, sample(tensor))
        for module in base.modules()
        for weight, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if not tensor.is_meta
    ]
    try:
        yield
    except NoMatchingPeftModuleError as error:
        layers = {path.rpartition(".")[2] for path, x in base.named_modules() if isinstance(x, nn.Linear | Conv1D)}
        raise ValueError(
            f"{name}: {error} The base's linear layers are {', '.join(sorted(layers))}; give a list of such names as "
            "target_modules, since a string is a regular expression for whole paths"
        ) from error
    if not all(torch.equal(numbers, sample(getattr(module, weight))) for module, weight, numbers in before):
        raise ValueError(
            f"{name} changes the base when its adapter is made, so the disabled adapter is not the reference policy; "
            "use init_lora_weights=True, 'gaussian' or 'orthogonal', and no variant that rewrites weights"
        )


@contextmanager
def warn_of_left_out(base: nn.Module, given: PeftConfig, fitted: PeftConfig) -> Iterator[None]:
    """Warn if the adapter of a mixture of experts, made in the block, leaves out weights that may be meant.

    Fused experts are no modules. For some architectures PEFT takes names of modules for them, and then no longer finds
    the dense layers and shared experts of the same names.

    Args:
        given: the configuration as the user gave it; with `target_parameters` it means what it says.
        fitted: the same after `fit_to_model`.
    """
    meant = set(expert_weights(base)) if getattr(given, "target_parameters", None) is None else set()
    if meant:
        targets = getattr(given, "target_modules", None) or ()
        everywhere = str(targets).lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND
        excluded = tuple(getattr(fitted, "exclude_modules", None) or ())
        meant |= {
            f"{path}.weight"
            for path, module in base.named_modules()
            if isinstance(module, nn.Linear) and "." in path and not path.endswith(excluded)
            if everywhere or path.rpartition(".")[2] in targets
        }
    weights = {name: base.get_parameter(name) for name in meant}
    yield
    layers = [x for x in base.modules() if isinstance(x, BaseTunerLayer)]
    adapted = {getattr(x.get_base_layer(), getattr(x, "parameter_name", "weight"), None) for x in layers}
    left_out = {short_name(name) for name, weight in weights.items() if weight not in adapted}
    if left_out:
        warnings.warn(
            f"peft_config adapts a mixture of experts, but not its {', '.join(sorted(left_out))}; name them in "
            "target_parameters of LoraConfig, or set target_parameters=[] if they are to be left out",
            stacklevel=2,
        )


def sample(weight: Tensor) -> Tensor:
    """Return the bytes of up to `SAMPLED` numbers of a tensor, evenly spread."""
    numbers = weight.detach().flatten()
    return numbers[:: max(1, numbers.numel() // SAMPLED)].clone().view(torch.uint8)


@torch.no_grad()
def policy_of(model: PeftModel) -> Tensor | None:
    """Return a model's (TOKENS, V) float32 log-probs of a short text, as its own forward computes them.

    None where a forward needs all processes or another device, as some kernels of attention do.
    """
    keep_four_bits(model)
    size = model.config.get_text_config().vocab_size
    ids = torch.arange(TOKENS, device=model.device)[None] * size // TOKENS
    try:
        with eval_mode(model):
            return model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(dim=-1)
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        logger.warning("model is not compared with the policy in training, because it cannot run here: %s", error)
        return None


def check_same_policy(model: PeftModel, before: Tensor, adapter: dict[str, Tensor]) -> None:
    """Raise if a model that was built from a loaded PeftModel is another policy.

    Args:
        before: from `policy_of`, for the loaded model.
        adapter: the loaded adapter's weights, to whose precision log-probs may be rounded.
    Raises:
        ValueError: the log-probs of a short text differ.
    """
    now = policy_of(model)
    eps = max(torch.finfo(weight.dtype).eps for weight in adapter.values())
    if now is None or not now.isfinite().all():
        return
    off = float((now - before).abs().max())
    if not off <= max(1e-3, 4 * eps * float(now.abs().max())):
        raise ValueError(
            f"model is a PeftModel whose log-probs are up to {off:.3g} nats off those of its active adapter: several "
            "are active or merged, an adapter was merged in half precision, its scale or configuration was changed, "
            "or a hook acts; load it again, and make several adapters one with add_weighted_adapter"
        )

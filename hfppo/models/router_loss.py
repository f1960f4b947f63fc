"""The load-balancing loss of a mixture of experts, if its configuration has output_router_logits=True."""

from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import ModelOutput


def router_coef(model: PreTrainedModel) -> float:
    """Return the factor of the loss, `router_aux_loss_coef`; 0 without output_router_logits."""
    config = model.config.get_text_config()
    return getattr(config, "router_aux_loss_coef", 0.0) if getattr(config, "output_router_logits", False) else 0.0


def router_loss(model: PreTrainedModel, outputs: ModelOutput, tokens: Tensor) -> Tensor:
    """Return E·Σ_e f_e·p_e over E experts, times `router_coef`: arXiv:2101.03961, eq. 4, as TRL adds it.

    f_e is the share of the choices that are e, p_e its mean probability; both over all layers, and all real tokens of
    a forward. As in TRL, the loss of a mini-batch is thus a mean over its forwards, and depends on their cut.

    Args:
        outputs: the trunk's.
        tokens: index of each token in the flattened output; −1 where it is not read.
    Raises:
        ValueError: the architecture returns no router logits.
    """
    config = model.config.get_text_config()
    logits, chosen = getattr(outputs, "router_logits", None), getattr(config, "num_experts_per_tok", None)
    if not logits or chosen is None:
        raise ValueError(
            f"output_router_logits=True asks for a load-balancing loss, but {type(model).__name__} returns no router "
            "logits; leave it out of model_init_kwargs and the model's config"
        )
    of_tokens = tuple(layer.flatten(0, -2)[tokens[tokens >= 0]].float() for layer in logits)
    return router_coef(model) * load_balancing_loss_func(of_tokens, of_tokens[0].shape[-1], chosen)

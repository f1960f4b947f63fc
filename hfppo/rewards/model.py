"""Reward models as reward functions. They score text, so their tokenizer may differ from the actor's.

    reward_funcs=[right_answer, "org/reward-model", "out/reward-adapter"]

An adapter for the actor's base uses the base that is already in memory.
"""

import copy
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel, load_peft_weights
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hfppo.data.chat_template import TEMPLATE_COLUMNS, Message, RunDate, apply_chat_template, template_options
from hfppo.data.prompts import Prompts
from hfppo.models.adapter_checks import unchanged
from hfppo.models.critic import shared_copy
from hfppo.models.layout import rows_at_once
from hfppo.models.vocabulary import saved_vocabulary
from hfppo.rewards.reward_func import BatchReward, unwrap
from hfppo.support.padding import pad_right


class RewardModel(BatchReward):
    """A sequence-classification model that follows the contract of `hfppo.rewards.reward_func`.

    A conversation is rendered by the reward tokenizer's chat template, with the row's `tools` and
    `chat_template_kwargs`. A plain prompt is followed by its completion and EOS. TRL's RewardTrainer does the same.
    EOS is not written where the tokenizer adds it anyway, as those of RoBERTa and DeBERTa do.

    Args:
        model: its head gives one number, or `label` says which one counts.
        tokenizer: the model's own; its padding token and side are not changed.
        batch_size: texts at once.
        label: index or name of the label that is the score; None for a model with one label.
        device: the model is moved to it before it scores; None leaves the model where it is.

    Raises:
        ValueError: a model with several labels and no `label`, or an unknown one.
    """

    date: RunDate | None = None  # the chat template's date; a trainer sets its own

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        batch_size: int = 64,
        label: int | str | None = None,
        device: torch.device | None = None,
    ):
        self.model = model.eval().requires_grad_(False)
        self.model.config.return_dict = True  # outputs are read by name
        self.batch_size = batch_size
        self.device = device
        self.tokenizer = copy.deepcopy(tokenizer)
        self.tokenizer.truncation_side = "left"
        name = str(model.config.name_or_path or type(model).__name__)
        self.__name__ = os.path.basename(name.rstrip("/"))
        self.max_length = max_length(model, tokenizer)
        self.label = find_label(model.config.num_labels, model.config.label2id or {}, label, name)

    def __call__(self, /, prompts: Sequence[Any], completions: Sequence[Any], **kwargs: Any) -> list[float]:
        """Return one score per completion."""
        if isinstance(prompts[0], str):
            eos = "" if adds_eos(self.tokenizer) else self.tokenizer.eos_token or ""
            texts = [prompt + completion + eos for prompt, completion in zip(prompts, completions, strict=True)]
        else:
            talks = map(conversation, prompts, completions)
            texts = [self.rendered(talk, kwargs, row) for row, talk in enumerate(talks)]
        # A chat template writes the special tokens itself.
        return self.score(texts, add_special_tokens=isinstance(prompts[0], str))

    def rendered(
        self, messages: list[Message], columns: Mapping[str, Sequence[object]], row: int, **options: bool
    ) -> str:
        """Return a conversation as the chat template renders it, with the options that a row's columns give."""
        given = {name: columns[name][row] for name in TEMPLATE_COLUMNS if columns.get(name)}
        options = template_options(given) | options
        return apply_chat_template(self.tokenizer, messages, self.date, tokenize=False, **options)

    def score(self, texts: list[str], add_special_tokens: bool = True) -> list[float]:
        """Return the scores of texts; a text longer than the model's positions loses its beginning."""
        options = {"truncation": self.max_length is not None, "max_length": self.max_length}
        encoded = self.tokenizer(texts, add_special_tokens=add_special_tokens, **options)["input_ids"] if texts else []
        if empty := [text for text, row in zip(texts, encoded, strict=True) if not row]:
            raise ValueError(f"reward model {self.__name__} cannot score {empty[0]!r}: the text has no tokens")
        return [float(logits[self.label]) for logits in self.outputs(encoded)]

    @torch.no_grad()
    def outputs(self, sequences: list[list[int]]) -> list[Tensor]:
        """Return the logits of each sequence of token ids, float32 on the CPU; the rows are computed by length."""
        if not hasattr(self.model, "hf_device_map"):  # a device map may have spread it over several devices
            # Trainer has moved the tensors that it shares with actor or critic, but not its own.
            self.model.to(self.device or next(self.model.parameters()).device)
        if not sequences:
            return []
        lengths = torch.tensor([len(row) for row in sequences])
        outputs = [torch.empty(0)] * len(sequences)
        device = next(self.model.parameters()).device
        for rows in lengths.argsort(descending=True).split(rows_at_once(self.batch_size, int(lengths.max()), device)):
            ids, mask = pad_right([sequences[row] for row in rows], torch.int64)
            computed = self.logits(ids.to(device), mask.long().to(device)).float().cpu()
            for row, logits in zip(rows, computed, strict=True):
                outputs[row] = logits
        return outputs

    def logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (B, labels) logits of (B, T) token ids, for a decoder the logits at the last real token."""
        model: Any = self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model
        if not hasattr(model, "score"):  # an encoder, which pools by itself
            return model(input_ids=ids, attention_mask=mask).logits
        # transformers finds the last token by `ids != pad`, which is wrong where EOS pads.
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return model.score(hidden[torch.arange(len(ids), device=ids.device), mask.sum(dim=1) - 1])


def adds_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer ends a text with EOS."""
    with_special, without = (tokenizer(".", add_special_tokens=added)["input_ids"] for added in (True, False))
    eos = tokenizer.eos_token_id
    return with_special[-1:] == [eos] != without[-1:]


def conversation(prompt: list[Message], completion: list[Message]) -> list[Message]:
    """Join a prompt and its completion, in one turn if the prompt ends with an unfinished assistant's."""
    *before, last = prompt
    if last["role"] != "assistant":
        return prompt + completion
    begun, added = last.get("content") or "", completion[0]["content"]
    content = [*begun, {"type": "text", "text": added}] if isinstance(begun, list) else begun + added
    return [*before, {**last, "content": content}]


def check_conversations(name: str, func: object, dataset: str, prompts: Prompts) -> None:
    """Raise if a reward model without a chat template gets conversations.

    Args:
        name, dataset: names of function and dataset, for the error.
    Raises:
        ValueError: the reward model's tokenizer has no chat template.
    """
    model = unwrap(func)
    if prompts.conversational and isinstance(model, RewardModel) and not model.tokenizer.chat_template:
        raise ValueError(
            f"reward model {name!r}: the prompts of {dataset} are conversations, but its own tokenizer has no "
            "chat_template; set one, or give another tokenizer in reward_processing_classes"
        )


def max_length(model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the number of tokens that the model can read; None if there is no limit."""
    if tokenizer.model_max_length < VERY_LARGE_INTEGER:
        return tokenizer.model_max_length  # RoBERTa's positions begin at 2: its config says more
    return getattr(model.config, "max_position_embeddings", None)


def find_label(num_labels: int, label2id: Any, label: int | str | None, name: str) -> int:
    """Return the index of the label that is the score."""
    if label is None and num_labels == 1:
        return 0
    index = label2id.get(label, -1) if isinstance(label, str) else -1 if label is None else label
    if not 0 <= index < num_labels:
        problem = "" if label is None else f" and label={label!r} is none of them"
        raise ValueError(
            f"reward model {name} has {num_labels} labels ({', '.join(map(str, label2id))}){problem}; say which is "
            "the score with RewardModel(model, tokenizer, label=...), or use a model with num_labels=1"
        )
    return index


class RewardAdapter(RewardModel):
    """A LoRA reward model on the actor's base: only adapter and head take memory.

    Call `attach` with the base before scoring.
    """

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase):
        self.path, self.tokenizer = path, tokenizer
        self.__name__ = os.path.basename(path.rstrip("/"))

    def attach(self, base: PreTrainedModel) -> None:
        """Put the adapter on a second module tree over the base's tensors, before the actor's adapter is added."""
        config = copy.deepcopy(base.config)
        config.num_labels = 1  # transformers warns of two label names if the call sets it
        with torch.device("meta"):  # the trunk is replaced below
            classifier: Any = AutoModelForSequenceClassification.from_config(config)
        trunk = shared_copy(base.base_model)
        setattr(classifier, classifier.base_model_prefix, trunk)
        size = saved_vocabulary(classifier, load_peft_weights(self.path, device="cpu"))
        if size is not None:  # loading them must not change the actor's
            trunk.set_input_embeddings(copy.deepcopy(trunk.get_input_embeddings()))
            classifier.resize_token_embeddings(size, mean_resizing=False)
        width = config.get_text_config().hidden_size
        classifier.score = nn.Linear(width, 1, bias=False, dtype=torch.float32, device=base.device)
        with unchanged(base, f"the reward adapter {self.path!r}"):
            model = PeftModel.from_pretrained(classifier, self.path)
        super().__init__(model, self.tokenizer)
        self.__name__ = os.path.basename(self.path.rstrip("/"))

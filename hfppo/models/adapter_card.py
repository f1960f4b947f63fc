"""The metadata of an adapter's model card."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard, cast

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import HFValidationError, validate_repo_id

CARD = "README.md"


def read_card(folder: str | Path) -> ModelCard | None:
    """Return the card in a folder; None if there is none."""
    path = Path(folder) / CARD
    return ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else None


def update_card(folder: str | Path, update: Callable[[str], None]) -> None:
    """Let PEFT write its metadata into the card, keep the card's own tags, and remove a path as base model.

    The Hub refuses a card whose base model is not one of its repositories (huggingface/transformers#33922).
    """
    before = read_card(folder)
    update(str(folder))
    card = cast(ModelCard, read_card(folder))
    data = cast(ModelCardData, card.data)
    kept = ModelCardData() if before is None else cast(ModelCardData, before.data)
    if not is_repository(data.base_model):
        data.base_model = kept.base_model if is_repository(kept.base_model) else None
    tags = [str(tag) for tag in (*as_list(data.tags), *as_list(kept.tags))]
    tags = [tag for tag in tags if not tag.startswith("base_model:")]
    if data.base_model:
        tags.append(f"base_model:adapter:{data.base_model}")
    data.tags = sorted(set(tags))
    card.save(Path(folder) / CARD)


def is_repository(name: object) -> TypeGuard[str]:
    """Return whether a name may be a Hub repository: it has the right form and is not a local folder."""
    if not isinstance(name, str) or not name or os.path.isdir(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def as_list(value: str | list[str] | None) -> list[str]:
    """Return None as an empty list, a string as a list of one, and anything else as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)

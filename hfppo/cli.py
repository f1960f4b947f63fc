"""What scripts share: arguments from flags and a YAML file, with TRL's parser, and data and functions by name.

    from hfppo import PPOConfig, PPOTrainer
    from hfppo.cli import ActorArguments, DataArguments, PPOParser, actor_config, load_data

    data_args, args, model_args = PPOParser((DataArguments, PPOConfig, ActorArguments)).parse_args_and_config()
    train, test = load_data(data_args)
    model = model_args.model_name_or_path
    trainer = PPOTrainer(model, reward, args, train, test, peft_config=actor_config(model_args))

Needs trl. The scripts in `recipes/` show it.
"""

import argparse
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset, DatasetDict, load_dataset
from peft import PeftConfig
from transformers import TrainingArguments
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from yaml import YAMLError

from hfppo.config import PPOConfig, option
from hfppo.config_checks import read_json

WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's in JSON
FILES = ("arrow", "csv", "json", "parquet", "text")  # formats that may be given in place of a dataset's name


@dataclass
class ActorArguments(ModelConfig):
    """TRL's ModelConfig with the defaults of an actor."""

    use_peft: bool = option(True, "Always True: the actor is an adapter.")
    lora_dropout: float = option(0.0, "Dropout adds noise to the ratio.")
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata={"help": "LoRA layers."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.lora_target_modules or "").isidentifier():  # TRL takes a single name out of its list: a pattern
            self.lora_target_modules = [str(self.lora_target_modules)]


@dataclass
class DataArguments:
    """Arguments of `datasets.load_dataset`, and the splits to use."""

    dataset_name: str = option("json", "Id or path of a dataset, or a format such as json.")
    dataset_config: str | None = option(None, "Its configuration, if it has several.")
    data_files: dict | str | None = option(None, 'A file, or several by split: {"train": …, "test": …}.')
    train_split: str = option("train", "The split to train on.")
    test_split: str = option("test", "The split to evaluate on, if there is one.")


@dataclass
class RewardArguments(DataArguments):
    """Arguments of scripts that take reward functions by name."""

    reward_funcs: list[str] = field(
        default_factory=list,
        metadata={"help": "Dotted paths of functions (trl.rewards.think_format_reward) and ids or paths of models."},
    )

    def __post_init__(self) -> None:
        if isinstance(self.reward_funcs, str):  # a single name in a YAML file
            self.reward_funcs = [self.reward_funcs]


class PPOParser(TrlParser):
    """TRL's parser, with a help that shows this package's arguments, and with TRL's names of fields translated.

    Flags need their whole name, and `--resume_from_checkpoint true` means the last checkpoint, `auto` the same if
    there is one. The flags of a ModelConfig become `model_init_kwargs`. An error ends the script with its reason and
    no traceback. `--help` shows the values of `--config`, `--help WORD` the arguments with this word in their name,
    and `--help-all` those of transformers and TRL as well.

    Args:
        dataclass_types: classes of arguments, such as `(DataArguments, PPOConfig, ActorArguments)`.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        classes: Any = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types
        self.config: type[PPOConfig] | None = next((cls for cls in classes if issubclass(cls, PPOConfig)), None)
        self.own = [f.name for cls in classes for f in fields(cls) if is_own(cls, f.name)]
        self.known = [f.name for cls in classes for f in fields(cls)]
        self.in_file: dict[str, Any] = {}  # what the YAML file sets
        usage = "%(prog)s [--config FILE.yaml] [--NAME VALUE ...]; --help WORD and --help-all show more arguments"
        super().__init__(classes, allow_abbrev=False, add_help=False, usage=usage, **kwargs)
        self.add_argument("-h", "--help", nargs="?", const="", help=argparse.SUPPRESS)
        self.add_argument("--help-all", action="store_true", help=argparse.SUPPRESS)

    def parse_args_and_config(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an instance of each dataclass; `resume_from_checkpoint` is a path, "auto", True or None."""
        try:
            parsed = super().parse_args_and_config(*args, **kwargs)
            model_args = next((arguments for arguments in parsed if isinstance(arguments, ModelConfig)), None)
            for arguments in parsed:
                if isinstance(arguments, TrainingArguments):  # a flag gives text, a YAML file a bool
                    value = arguments.resume_from_checkpoint
                    arguments.resume_from_checkpoint = {"true": True, "false": None}.get(str(value).lower(), value)
                    if model_args is not None:
                        arguments.model_init_kwargs = init_kwargs(arguments, model_args)
        except IndexError:
            self.error("--config needs the path of a YAML file")
        except (OSError, TypeError, ValueError, YAMLError) as error:
            self.error(str(error))
        return parsed

    def set_defaults_with_config(self, **kwargs: Any) -> list[str]:
        """Take the defaults from a YAML file; `parse_known_args` translates or refuses its unknown names."""
        self.in_file = kwargs
        super().set_defaults_with_config(**kwargs)
        return []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse the flags. Arguments of the YAML file and flags that have TRL's names are translated.

        Raises:
            TypeError, ValueError: names all unknown arguments.
        """
        words = sys.argv[1:] if args is None else list(args)
        namespace, rest = super().parse_known_args(words, namespace)
        word, show_all = vars(namespace).pop("help"), vars(namespace).pop("help_all")
        if word is not None or show_all:
            self.show_help([name for name in self.known if show_all or (word and word in name)], word)
        given = self.in_file | read_flags(words)
        unknown = {name: x for name, x in (self.in_file | read_flags(rest)).items() if name not in self.known}
        if (rest and not rest[0].startswith("--")) or (unknown and not self.config):
            self.refuse(list(unknown) or rest)
        if unknown:
            values = {name: getattr(namespace, name) for name in given if name in self.known} | unknown
            vars(namespace).update(self.config.translate_names(values, self.known))
        return namespace, []

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Raise TypeError or ValueError for unknown arguments, with the names that are most like theirs."""
        if self.config:
            self.config.translate_names(dict.fromkeys(unknown), self.known)
        raise ValueError(f"there is no argument for {', '.join(unknown)}")

    def show_help(self, names: list[str], word: str | None) -> None:
        """Print the help of some arguments, or of this package's, the script's and the YAML file's; end the script."""
        if word and not names:
            self.refuse([word])
        for action in self._actions:
            is_opposite = action.option_strings[0].startswith("--no_")  # of a switch that is on by default
            if is_opposite or action.dest not in (names or [*self.own, *self.in_file]):
                action.help = argparse.SUPPRESS
        self.print_help()
        self.exit()


def is_own(cls: type, name: str) -> bool:
    """Return whether this package or the script declares a field, not transformers or TRL."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    return owner.__module__.partition(".")[0] not in ("transformers", "trl")


def read_flags(words: list[str]) -> dict[str, Any]:
    """Return flags by name, with the value of their last word in JSON, or its text; True for a flag without a word."""
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, text = word.strip("-").partition("=")
        else:
            text = word
        if name:
            flags[name.replace("-", "_")] = read_json(WORDS.get(text, text)) if text else True
    return flags


def init_kwargs(args: Any, model_args: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained`: ModelConfig's flags, overridden by `args.model_init_kwargs`."""
    if model_args.model_name_or_path is None:
        raise ValueError("model_name_or_path is missing; give the id or path of a model or of an adapter")
    quantization = get_quantization_config(model_args)
    flags = {
        "revision": model_args.model_revision,
        "dtype": model_args.dtype,
        "attn_implementation": model_args.attn_implementation,
        "quantization_config": None if quantization is None else quantization.to_dict(),
    }
    return {name: value for name, value in flags.items() if value is not None} | (args.model_init_kwargs or {})


def actor_config(model_args: ActorArguments) -> PeftConfig | None:
    """Return the configuration of a new adapter from the flags; None if the model is already an adapter.

    Raises:
        ValueError: `use_peft` is False, or flags are set that would configure an existing adapter; names them.
    """
    if not model_args.use_peft:
        raise ValueError(
            "use_peft=False: the actor is always an adapter, and the other flags describe it; leave use_peft out"
        )
    try:
        adapter = find_adapter_config_file(model_args.model_name_or_path, revision=model_args.model_revision)
    except OSError:  # no such model: PPOTrainer's error says more
        adapter = None
    if adapter is None:
        return get_peft_config(model_args)
    default = type(model_args)()
    names = [f.name for f in fields(model_args) if f.name.startswith(("lora_", "use_rslora", "use_dora"))]
    if given := [name for name in names if getattr(model_args, name) != getattr(default, name)]:
        raise ValueError(
            f"{', '.join(given)}: model_name_or_path={model_args.model_name_or_path!r} is an adapter, which keeps its "
            "own configuration; leave them out, or start from its base"
        )
    return None


def load_data(args: DataArguments) -> tuple[Dataset, Dataset | None]:
    """Return the rows to train on, and the rows to evaluate on or None.

    Raises:
        ValueError: `data_files` is missing, or there is no split `train_split`.
    """
    files = read_json(args.data_files)
    if args.dataset_name in FILES and not files:  # datasets would read all files of the working folder
        raise ValueError(
            f"data_files is missing, and dataset_name={args.dataset_name!r} only says what kind they are; give them, "
            "or a dataset's id or path as dataset_name"
        )
    splits: DatasetDict = load_dataset(args.dataset_name, args.dataset_config, data_files=files)
    if args.train_split not in splits:
        raise ValueError(
            f"train_split={args.train_split!r} is not in {args.dataset_name}, which has {', '.join(splits)}"
        )
    return splits[args.train_split], splits.get(args.test_split)


def import_function(name: str) -> Callable[..., Any]:
    """Import a function by its dotted path, from a package or from a file in the working folder."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def load_reward(name: str) -> Any:
    """Return the id or path of a model as it is; import a function by its dotted path."""
    is_model = Path(name).exists() or "/" in name or "." not in name
    return name if is_model else import_function(name)

"""What scripts share: arguments from flags and a YAML file, with TRL's parser, and data and functions by name.

    from hfppo import PPOConfig, PPOTrainer
    from hfppo.cli import ActorArguments, DataArguments, PPOParser, actor_config, load_data

    data_args, args, model_args = PPOParser((DataArguments, PPOConfig, ActorArguments)).parse_args_and_config()
    train, test = load_data(data_args)
    trainer = PPOTrainer(
        model_args.model_name_or_path, reward, args, train, test, peft_config=actor_config(model_args)
    )

Needs trl. The scripts in `recipes/` show it.
"""

import importlib
import inspect
import io
import json
import os
import shutil
import sys
import textwrap
from argparse import Action, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from datasets import Dataset, DatasetDict, load_dataset
from peft import PeftConfig
from transformers import TrainingArguments
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from yaml import YAMLError

from hfppo.config import PPOConfig
from hfppo.config_checks import read_json

WORDS = {"True": "true", "False": "false", "None": "null"}  # Python's in JSON
FILES = ("arrow", "csv", "json", "parquet", "text")  # formats that may be given in place of a dataset's name

# Sections of PPOConfig in `--help`, each by its first field.
SECTIONS = {
    "learning_rate": "other defaults than TrainingArguments",
    "bf16": "chosen by the dtype of the base if you leave them out",
    "num_ppo_epochs": "the rollout",
    "use_vllm": "the sampler",
    "rollouts_ahead": "which policy samples",
    "reward_weights": "rewards",
    "kl_coef": "KL to the reference",
    "advantage_estimator": "advantages",
    "policy_loss": "the losses",
    "critic_learning_rate": "the critic",
    "model_init_kwargs": "evaluation and loading",
    "log_completions": "output only",
    "max_tokens_per_micro_batch": "speed and memory only",
}


@dataclass
class ActorArguments(ModelConfig):
    """TRL's ModelConfig with the defaults of an actor."""

    use_peft: bool = field(default=True, metadata={"help": "Always True: the actor is an adapter."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout adds noise to the ratio."})
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata={"help": "LoRA layers."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.lora_target_modules or "").isidentifier():  # TRL takes a single name out of its list: a pattern
            self.lora_target_modules = [str(self.lora_target_modules)]


@dataclass
class DataArguments:
    """Arguments of `datasets.load_dataset`, and the splits to use."""

    dataset_name: str = field(default="json", metadata={"help": "Id or path of a dataset, or a format such as json."})
    dataset_config: str | None = field(default=None, metadata={"help": "Its configuration, if it has several."})
    data_files: dict | str | None = field(
        default=None, metadata={"help": 'A file, or several by split: {"train": …, "test": …}.'}
    )
    train_split: str = field(default="train", metadata={"help": "The split to train on."})
    test_split: str = field(default="test", metadata={"help": "The split to evaluate on, if there is one."})


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
    """TRL's parser, with the errors of PPOConfig and a help that begins with this package's arguments.

    Flags need their whole name, and `--resume_from_checkpoint true` means the last checkpoint, `auto` the same if
    there is one. TRL's names of fields are translated. The flags of a ModelConfig become `model_init_kwargs`. An error
    ends the script with its reason and no traceback. `--help` shows the values of `--config` and the sizes that they
    make. `--help WORD` shows the arguments with this word in their name, and `--help-all` those of transformers and
    TRL as well.

    Args:
        dataclass_types: classes of arguments, such as `(DataArguments, PPOConfig, ActorArguments)`.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # help and completions have characters that a terminal may lack
        classes = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types
        self.config: type[PPOConfig] | None = next((cls for cls in classes if issubclass(cls, PPOConfig)), None)
        self.of_config = {f.name for f in fields(self.config)} if self.config else set()
        self.known: dict[str, dict[str, Any]] = {}  # options of each argument by its name
        self.in_file: dict[str, Any] = {}  # what the YAML file sets
        super().__init__(dataclass_types, allow_abbrev=False, add_help=False, **kwargs)
        super().add_argument("-h", "--help", nargs="?", const="")
        super().add_argument("--help-all", action="store_true")

    def add_argument(self, *names: str, **options: Any) -> Action:
        """Add an argument of a dataclass. PPOConfig says what is wrong with a value of its fields."""
        name = names[0].removeprefix("--")
        if "dest" not in options:  # not the --no_… of another argument
            self.known[name] = dict(options)
            if name in self.of_config:
                options |= {"type": text_if_unfit(options["type"]), "choices": None}
        return super().add_argument(*names, **options)

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
        self.show_help(vars(namespace).pop("help"), vars(namespace).pop("help_all"))
        unknown = {name: x for name, x in self.in_file.items() if name not in self.known} | read_flags(rest)
        if (rest and not rest[0].startswith("--")) or (unknown and not self.config):
            self.refuse(list(unknown) or rest)
        if unknown:
            given = {*self.in_file, *read_flags(words)} & self.known.keys()
            values = {name: getattr(namespace, name) for name in given} | unknown
            vars(namespace).update(self.config.translate_names(values, self.known))
        return namespace, []

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Raise TypeError or ValueError for unknown arguments, with the names that are most like theirs."""
        if self.config:
            self.config.translate_names(dict.fromkeys(unknown), self.known)
        raise ValueError(f"there is no argument for {', '.join(unknown)}")

    def error(self, message: str) -> NoReturn:
        """End the script with a reason; argparse would print all flags before it."""
        self.exit(2, f"{self.prog}: error: {message}\n(--help lists the arguments, --help WORD some of them)\n")

    def show_help(self, word: str | None, show_all: bool) -> None:
        """Print the help that was asked for, if any, and end the script."""
        if word is None and not show_all:
            return
        names = [name for name in self.known if word and word in name]
        if word and not names:
            self.refuse([word])
        print(self.format_help([*self.known] if show_all else names))
        self.exit()

    def format_help(self, names: Sequence[str] = ()) -> str:
        """Return the help of some arguments; of none: of this package's, the script's and the YAML file's."""
        sections: dict[str, list[str]] = {}
        for cls in self.dataclass_types:
            for name in (f.name for f in fields(cls) if f.name in self.known):
                title, is_own = section_of(cls, name)
                if name in names or (not names and (is_own or name in self.in_file)):
                    sections.setdefault(title, []).extend(self.describe_argument(name))
        parts = [f"usage: {self.prog} [--config FILE.yaml] [--NAME VALUE ...]"]
        parts += ["\n".join([f"{title}:", *lines]) for title, lines in sections.items()]
        parts.append("--help-all shows those of transformers and TRL as well, --help WORD those with WORD in the name")
        return "\n\n".join([*parts, self.describe_sizes()])

    def describe_argument(self, name: str) -> list[str]:
        """Return a flag with its choices, and below it its help and its default."""
        options, default = self.known[name], self.get_default(name)
        choices = f" {{{','.join(map(str, options['choices']))}}}" if options.get("choices") else ""
        text = f"{options.get('help', '')} (default: {default})"
        width = shutil.get_terminal_size().columns - 8
        return [f"  --{name}{choices}", textwrap.indent(textwrap.fill(text, width), 6 * " ")]

    def describe_sizes(self) -> str:
        """Return the sizes of rollouts that the defaults make; empty without the arguments of PPO."""
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs")
        batch, accumulation, mini_batches, epochs = (self.get_default(name) for name in names)
        if epochs is None:
            return ""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        completions = batch * accumulation * mini_batches
        if size := self.get_default("rollout_size"):
            completions = size // processes
        both = epochs, self.get_default("num_critic_epochs") or epochs
        one_by_one = self.get_default("critic_update") not in (None, "together")
        steps = (sum(both) if one_by_one else max(both)) * mini_batches
        return (
            f"sizes with these defaults and {processes} process(es): rollouts of {completions * processes} "
            f"completions ({completions} per process), {steps} optimizer steps each"
        )


def section_of(cls: type, name: str) -> tuple[str, bool]:
    """Return the title of a field's section in the help, and whether this package or the script declares the field."""
    owner = next(base for base in cls.__mro__ if name in inspect.get_annotations(base))
    package = owner.__module__.partition(".")[0]
    if owner is PPOConfig:
        before = [*inspect.get_annotations(PPOConfig)]
        first = [other for other in before[: before.index(name) + 1] if other in SECTIONS][-1]
        return f"PPOConfig: {SECTIONS[first]}", True
    if package in ("transformers", "trl"):
        return f"{owner.__name__} of {package}", False
    return inspect.getdoc(owner).partition("\n")[0].rstrip("."), True


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


def text_if_unfit(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the same conversion, which leaves a text that does not fit as it is."""

    def read(text: str) -> Any:
        try:
            return convert(text)
        except (ArgumentTypeError, TypeError, ValueError):
            return text

    return read


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
    files = args.data_files
    if args.dataset_name in FILES and not files:  # datasets would read all files of the working folder
        raise ValueError(
            f"data_files is missing, and dataset_name={args.dataset_name!r} only says what kind they are; give them, "
            "or a dataset's id or path as dataset_name"
        )
    if isinstance(files, str) and files.startswith("{"):
        files = json.loads(files)
    splits: DatasetDict = load_dataset(args.dataset_name, args.dataset_config, data_files=files)
    if args.train_split not in splits:
        raise ValueError(
            f"train_split={args.train_split!r} is not in {args.dataset_name}, which has {', '.join(splits)}"
        )
    return splits[args.train_split], splits.get(args.test_split)


def import_function(name: str) -> Callable[..., Any]:
    """Import a function by its dotted path, from a package or from a file in the working folder.

    Raises:
        ValueError: there is no such function.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no function that can be imported: {error}") from error


def load_reward(name: str) -> Any:
    """Return the id or path of a model as it is; import a function by its dotted path."""
    is_model = Path(name).exists() or "/" in name or "." not in name
    return name if is_model else import_function(name)

"""The arguments that recipes share, and their parser."""

import inspect
import io
import json
import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentDefaultsHelpFormatter, ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, NoReturn

import torch
from peft import PeftConfig
from transformers import TrainingArguments
from transformers.utils import find_adapter_config_file
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from yaml import YAMLError

from hfppo import PPOConfig

SMALL = 10_000_000  # parameters; the bases in this folder have up to 400,000


@dataclass
class ActorArguments(ModelConfig):
    """TRL's ModelConfig with the defaults of an actor."""

    use_peft: bool = field(default=True, metadata={"help": "Always True: the actor is an adapter."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout adds noise to the ratio."})
    lora_target_modules: list[str] = field(default_factory=lambda: ["all-linear"], metadata={"help": "LoRA layers."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if str(self.lora_target_modules or "").isidentifier():  # TRL takes a single name out of its list: a pattern
            self.lora_target_modules = [self.lora_target_modules]


class HelpFormatter(ArgumentDefaultsHelpFormatter):
    """A flag on a line of its own, its help below."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6)

    def _format_action_invocation(self, action: Action) -> str:
        # A hook of argparse, which would print each spelling followed by the name in capitals.
        return f"{action.option_strings[0]} {action.metavar or ''}".rstrip()


class ShowHelp(Action):
    """Print the help of this package's arguments, of those whose names contain a word, or of all."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        names = [action.dest for action in parser._actions]
        wanted = [name for name in names if values and values in name]
        if values and not wanted:
            parser.refuse([values])
        parser.shown = names if option_string == "--help-all" else wanted
        parser.print_help()
        parser.exit()


class RecipeParser(TrlParser):
    """TRL's parser, with the errors of PPOConfig and a help that begins with this package's arguments.

    Flags need their whole name, and `--resume_from_checkpoint true` means the last checkpoint. An error ends the
    script with its reason and no traceback. The help shows the values of `--config` and the sizes that they make.
    """

    def __init__(self, dataclass_types: Any, **kwargs: Any) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # help and completions have characters that a terminal may lack
        super().__init__(dataclass_types, allow_abbrev=False, add_help=False, formatter_class=HelpFormatter, **kwargs)
        self.in_file: dict[str, Any] = {}  # what the YAML file sets
        self.shown: list[str] = []  # the names that the help shows; if empty, our own and those of the file
        self.config = next((cls for cls in self.dataclass_types if issubclass(cls, PPOConfig)), None)
        of_config = {f.name for f in fields(self.config)} if self.config else set()
        for action in self._actions:
            if action.dest in of_config and action.type is not None:  # PPOConfig says what is wrong with a value
                if action.choices is not None:
                    action.metavar, action.choices = f"{{{','.join(map(str, action.choices))}}}", None
                action.type = text_if_unfit(action.type)
        hidden = {"action": ShowHelp, "dest": SUPPRESS, "default": SUPPRESS}  # not in the parsed arguments
        self.add_argument("-h", "--help", nargs="?", const="", **hidden)
        self.add_argument("--help-all", nargs=0, **hidden)

    def parse_args_and_config(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an instance of each dataclass; `resume_from_checkpoint` is a path, True or None."""
        try:
            parsed = super().parse_args_and_config(*args, **kwargs)
        except IndexError:
            self.error("--config needs the path of a YAML file")
        except (OSError, TypeError, ValueError, YAMLError) as error:
            self.error(str(error))
        for arguments in parsed:
            if isinstance(arguments, TrainingArguments):  # a flag gives text, a YAML file a bool
                value = arguments.resume_from_checkpoint
                arguments.resume_from_checkpoint = {"true": True, "false": None}.get(str(value).lower(), value)
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
        known = [action.dest for action in self._actions]
        unknown = {name: x for name, x in self.in_file.items() if name not in known} | read_flags(rest)
        if (rest and not rest[0].startswith("--")) or (unknown and not self.config):
            self.refuse(list(unknown) or rest)
        if unknown:
            given = {name: getattr(namespace, name) for name in {*self.in_file, *read_flags(words)} - unknown.keys()}
            vars(namespace).update(self.config.translate_names(given | unknown, known))
        return namespace, []

    def refuse(self, unknown: list[str]) -> NoReturn:
        """Raise TypeError or ValueError for unknown arguments, with the names that are most like theirs."""
        if self.config:
            self.config.translate_names(dict.fromkeys(unknown), [action.dest for action in self._actions])
        raise ValueError(f"there is no argument for {', '.join(unknown)}")

    def error(self, message: str) -> NoReturn:
        """End the script with a reason; argparse would print all flags before it."""
        self.exit(2, f"{self.prog}: error: {message}\n(--help lists the arguments, --help WORD some of them)\n")

    def format_help(self) -> str:
        """Return the help: in the sections of config.py, and with sizes for the number of processes."""
        sections: dict[str, list[Action]] = {}
        for cls in self.dataclass_types:
            for action in self._actions:
                if action.dest in cls.__dataclass_fields__ and action.option_strings[0] == f"--{action.dest}":
                    title, is_own = section_of(cls, action.dest)
                    is_default = not self.shown and (is_own or action.dest in self.in_file)
                    if is_default or action.dest in self.shown:
                        sections.setdefault(title, []).append(action)
        formatter = self._get_formatter()
        formatter.add_text(f"usage: {self.prog} [--config FILE.yaml] [--NAME VALUE ...]")
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        formatter.add_text(
            "--help-all shows the arguments of transformers and TRL as well, --help WORD those with WORD in their name"
        )
        formatter.add_text(self.describe_sizes())
        return formatter.format_help()

    def describe_sizes(self) -> str:
        """Return the sizes of rollouts that the defaults make; empty without the arguments of PPO."""
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_mini_batches", "num_ppo_epochs")
        batch, accumulation, mini_batches, epochs = (self.get_default(name) for name in names)
        if epochs is None:
            return ""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        completions = batch * accumulation * mini_batches
        steps = max(epochs, self.get_default("num_critic_epochs") or 0) * mini_batches
        return (
            f"sizes with these defaults and {processes} process(es): rollouts of {completions * processes} "
            f"completions ({completions} per process), {steps} optimizer steps each"
        )


def read_flags(words: list[str]) -> dict[str, Any]:
    """Return flags by name, with the JSON value of their last word, or its text; True for a flag without a word."""
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, text = word.strip("-").partition("=")
            name = name.replace("-", "_")
        else:
            text = word
        if name:
            flags[name] = read_value(text) if text else True
    return flags


def read_value(text: str) -> Any:
    """Return the value of a text in JSON, where Python's words count too, and other texts unchanged."""
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    except ValueError:
        return text


def text_if_unfit(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the same conversion, which leaves a text that does not fit as it is."""

    def read(text: str) -> Any:
        try:
            return convert(text)
        except (ArgumentTypeError, TypeError, ValueError):
            return text

    return read


def section_of(cls: type, name: str) -> tuple[str, bool]:
    """Return the title of a field's section in the help, and whether this package or the recipe declares the field."""
    owner = next(base for base in cls.__mro__ if name in vars(base).get("__annotations__", {}))
    package = owner.__module__.partition(".")[0]
    if owner is PPOConfig:
        return sections_of_config()[name], True
    if package in ("transformers", "trl"):
        return f"{owner.__name__} of {package}", False
    return inspect.getdoc(owner).partition("\n")[0].rstrip("."), True


@cache
def sections_of_config() -> dict[str, str]:
    """Return the title of each field of PPOConfig: the comment above its group in the source."""
    found, title = {}, ""
    for comment, name in re.findall(r"^    (?:# (.*)\.|(\w+): .*)$", inspect.getsource(PPOConfig), re.MULTILINE):
        title = comment.rpartition(": ")[2] or title
        found[name] = f"PPOConfig: {title}"
    return found


def use_one_thread_if_small(model: torch.nn.Module) -> None:
    """Let torch compute in one thread if a model on a CPU is so small that more threads cost more than they save."""
    weights = list(model.parameters())
    if weights[0].device.type == "cpu" and sum(weight.numel() for weight in weights) < SMALL:
        torch.set_num_threads(1)


def init_kwargs(args: TrainingArguments, model_args: ModelConfig) -> dict[str, Any]:
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

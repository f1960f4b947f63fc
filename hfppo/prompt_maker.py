"""The prompts of the datasets of a run."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hfppo.config import PPOConfig
from hfppo.data.chat_template import RunDate
from hfppo.data.prompt_stream import AnyDataset, EvalDataset, PromptStream
from hfppo.data.prompts import EMPTY_PROMPT, Prompts, hash_rows, prepare_prompts
from hfppo.environments.agents import Agents
from hfppo.support.processes import check_alike

TRAIN, EVAL = "train_dataset", "eval_dataset"  # the names of the datasets in errors


@dataclass
class PromptMaker:
    """Checks and tokenizes datasets for a run.

    Args:
        date: the date that chat templates read.
        chat_template_kwargs: passed to the chat template for every prompt, the date among them.
        datasets: the trainer's, by their names in errors; their prompts are made at once.
    """

    tokenizer: PreTrainedTokenizerBase
    args: PPOConfig
    agents: Agents | None
    date: RunDate
    chat_template_kwargs: dict[str, Any]
    datasets: dict[str, AnyDataset] = field(default_factory=dict)
    prompts: dict[str, Prompts | PromptStream] = field(default_factory=dict, init=False)  # of `datasets`

    def __post_init__(self) -> None:
        self.move_to(self.date)

    def move_to(self, date: RunDate) -> None:
        """Make the prompts of the trainer's datasets, as of a date."""
        self.date.day = date.day
        for name, dataset in self.datasets.items():
            streams = name == TRAIN and isinstance(dataset, IterableDataset)
            self.prompts[name] = self.of_stream(dataset) if streams else self.of_dataset(dataset, name)

    def find(self, dataset: object) -> Prompts | None:
        """Return the prompts of a dataset that is one of the trainer's; a collective call, if it is."""
        for name, some in self.prompts.items():
            if self.datasets[name] is dataset and isinstance(some, Prompts):
                check_alike({"the name of the evaluated dataset": name})
                return some
        return None

    def of_dataset(self, dataset: AnyDataset, name: str, may_be_empty: bool = False, alike: bool = True) -> Prompts:
        """Return the prompts of a dataset, or of a whole stream.

        Args:
            name: the dataset's name in errors.
            alike: whether all processes are given the same rows, and make this call.
        Raises:
            TypeError, ValueError: the rows cannot be used, or differ between processes.
        """
        if not isinstance(dataset, Dataset | IterableDataset):
            raise TypeError(
                f"{name} must be a datasets.Dataset, got {type(dataset).__name__}; choose one split of several, or "
                "make one with Dataset.from_list([{'prompt': ...}])"
            )
        if isinstance(dataset, IterableDataset):
            dataset = Dataset.from_list(list(dataset), features=dataset.features)
        if alike and self.args.world_size > 1:  # before the processes wait for each other to tokenize
            facts = {"number of rows": len(dataset), "columns": dataset.column_names, "rows": hash_rows(dataset)}
            check_alike({f"{name}: {fact}": value for fact, value in facts.items()})
        agents = self.agents
        has_agent = agents is not None and agents.agent is not None  # which writes its prompts
        resets = agents is not None and bool(agents.environments)
        adds = resets and "prompt" not in dataset.column_names
        empty = [EMPTY_PROMPT] * len(dataset)
        completed = dataset.add_column("prompt", empty) if adds else dataset
        completed = Dataset.from_dict({"prompt": empty}) if has_agent else completed
        # One process of each machine tokenizes, and the others read the ids that it has stored.
        with self.args.main_process_first() if alike else nullcontext():
            prompts = prepare_prompts(
                completed,
                self.tokenizer,
                self.chat_template_kwargs,
                name,
                tools=None if agents is None else agents.schemas_of(completed, name),
                completed=resets or has_agent,
                for_critic=self.args.needs_critic and not name.startswith(EVAL),
            )
        prompts = prompts.limited(self.args.max_prompt_length, name, may_be_empty)
        if has_agent:
            return replace(prompts, rows=dataset)
        # `reset` gets the dataset's own columns.
        return replace(prompts, rows=prompts.rows.remove_columns("prompt")) if adds else prompts

    def of_stream(self, dataset: IterableDataset) -> PromptStream:
        """Return the prompts of a stream.

        Raises:
            ValueError: neither max_steps nor total_episodes is set, or max_prompt_length is not.
        """
        if self.args.max_steps <= 0:
            raise ValueError("train_dataset is a stream of unknown length; set max_steps or total_episodes")
        if (longest := self.args.max_prompt_length) is None:
            raise ValueError("train_dataset is a stream with prompts of unknown length; set max_prompt_length")
        prepare = partial(self.of_dataset, may_be_empty=True, alike=False)  # processes read at different times
        return PromptStream(dataset, prepare, longest)


def by_name(train_dataset: AnyDataset | None, eval_dataset: EvalDataset) -> dict[str, AnyDataset]:
    """Return datasets by their names in errors."""
    named: dict[str, Any] = {TRAIN: train_dataset, EVAL: eval_dataset}
    if isinstance(eval_dataset, dict):
        named = {TRAIN: train_dataset, **{f"{EVAL}[{name!r}]": dataset for name, dataset in eval_dataset.items()}}
    return {name: dataset for name, dataset in named.items() if dataset is not None}

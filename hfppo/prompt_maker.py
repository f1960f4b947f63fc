"""The prompts of the datasets of a run."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hfppo.config import PPOConfig
from hfppo.data.chat_template import RunDate
from hfppo.data.prompt_stream import EvalDataset, PromptStream, read_all
from hfppo.data.prompts import Prompts, describe_rows, is_stored, media_columns, prepare_prompts
from hfppo.environments.agents import Agents, dataset_for
from hfppo.support.processes import check_alike


@dataclass(frozen=True)
class DatasetPrompts:
    """The prompts of all datasets."""

    train: Prompts | PromptStream | None
    eval: dict[str | None, Prompts]  # keyed by name; None for a single dataset

    @property
    def named(self) -> dict[str, Prompts | PromptStream]:
        """The prompts by the names of the datasets in errors."""
        of_train = {} if self.train is None else {"train_dataset": self.train}
        return {**of_train, **{label_eval(name): some for name, some in self.eval.items()}}

    @property
    def known(self) -> dict[str, Prompts]:
        """The prompts that are known before the run, by the names in errors."""
        return {name: some.head for name, some in self.named.items()}

    @property
    def dated(self) -> bool:
        """Whether the text of some prompts may depend on the date."""
        return any(some.dated for some in self.known.values())


@dataclass(frozen=True)
class PromptMaker:
    """Checks and tokenizes datasets for a run.

    Args:
        date: the date that chat templates read.
        chat_template_kwargs: passed to the chat template for every prompt, the date among them.
        reads: the columns that reward functions and environments have as parameters.
    """

    tokenizer: PreTrainedTokenizerBase
    args: PPOConfig
    agents: Agents | None
    date: RunDate
    chat_template_kwargs: dict[str, Any]
    reads: frozenset[str] = frozenset()

    def of_datasets(
        self,
        train_dataset: Dataset | IterableDataset | None,
        eval_dataset: EvalDataset,
    ) -> DatasetPrompts:
        """Return the prompts of all datasets."""
        train: Prompts | PromptStream | None = None
        if isinstance(train_dataset, IterableDataset):
            train = self.of_stream(train_dataset)
        elif train_dataset is not None:
            train = self.of_dataset(train_dataset, "train_dataset")
        given = eval_dataset if isinstance(eval_dataset, dict) else {None: eval_dataset}
        if unnamed := [name for name in given if not isinstance(name, str | None)]:
            raise TypeError(f"eval_dataset names a dataset by {unnamed[0]!r}; name each by text")
        prompts = {n: self.of_dataset(some, label_eval(n)) for n, some in given.items() if some is not None}
        return DatasetPrompts(train, prompts)

    def move_to(
        self,
        date: RunDate,
        prompts: DatasetPrompts,
        train_dataset: Dataset | IterableDataset | None,
        eval_dataset: EvalDataset,
    ) -> DatasetPrompts:
        """Change the date of the run, and return its prompts, made again if their text may depend on the date."""
        self.date.day = date.day
        return self.of_datasets(train_dataset, eval_dataset) if prompts.dated else prompts

    def of_dataset(
        self, dataset: Dataset | IterableDataset, name: str, may_be_empty: bool = False, alike: bool = True
    ) -> Prompts:
        """Return the prompts of a dataset, or of a whole stream.

        Args:
            name: the dataset's name in errors.
            alike: whether all processes are given the same rows, and make this call.
        Raises:
            TypeError, ValueError: the rows cannot be used, or differ between processes.
        """
        agents = self.agents
        dataset = self.without_media(dataset)
        if isinstance(dataset, IterableDataset):
            dataset = read_all(dataset)
        if alike and self.args.world_size > 1:  # before the processes wait for each other to tokenize
            check_alike({f"{name}: {fact}": value for fact, value in describe_rows(dataset).items()})
        completed = dataset_for(dataset, agents)
        # One process of each machine tokenizes, and the others read the ids that it has stored.
        with self.args.main_process_first() if is_stored(completed) else nullcontext():
            prompts = prepare_prompts(
                completed,
                self.tokenizer,
                self.chat_template_kwargs,
                name,
                tools=None if agents is None else agents.schemas_of(completed, name),
                completed=agents is not None and agents.has_environments,
            )
        prompts = prompts.limited(self.args.max_prompt_length, name, may_be_empty)
        # `reset` gets the dataset's own columns.
        return prompts if completed is dataset else replace(prompts, rows=prompts.rows.remove_columns("prompt"))

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
        return PromptStream(self.without_media(dataset), prepare, longest)

    def without_media(self, dataset: Any) -> Any:
        """Return a dataset without the columns of images, audio or other files that no function names.

        A transform sees all columns.
        """
        if not (media := media_columns(dataset)):
            return dataset
        if isinstance(dataset, IterableDataset) and self.reads.isdisjoint(media):
            dataset = dataset.decode(False)  # it would decode before it removes
        return dataset.remove_columns([name for name in media if name not in self.reads])


def label_eval(name: str | None) -> str:
    """Return the name of an evaluation dataset in errors."""
    return "eval_dataset" if name is None else f"eval_dataset[{name!r}]"

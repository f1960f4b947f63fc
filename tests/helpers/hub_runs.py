"""Run by test_hub.py in processes of their own, because the address of the Hub is read once: trains, or loads."""

import io
import re
import sys
import traceback
from contextlib import redirect_stdout
from pathlib import Path

import torch
from build_arithmetic_base import character_tokenizer
from datasets import Dataset
from huggingface_hub import constants, snapshot_download
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, pipeline

from helpers.runs import SUMS, small_trainer
from helpers.tiny import tiny_model
from hfppo import PPOTrainer

MODE, OUT, TOKEN = sys.argv[1], Path(sys.argv[2]), sys.argv[4]
BASE = "team/base"
CONFIG = {
    "save_strategy": "steps",
    "save_steps": 3,  # 3 and 6 lie within rollouts
    "eval_strategy": "steps",
    "eval_steps": 4,
    "hub_token": TOKEN,
}
PROMPT = "请问3+4="
LOGIT_IDS = torch.tensor([[14, 15, 2, 12, 5, 13]])


def make(name: str, model: str = BASE, stop: int | None = None, **config) -> PPOTrainer:
    given = {"train_dataset": SUMS, "eval_dataset": SUMS, "processing_class": None, **config.pop("trainer", {})}
    callback = TrainerCallback()
    callback.on_step_end = lambda _, state, control, **__: setattr(
        control, "should_training_stop", state.global_step == stop
    )
    return small_trainer(OUT / name, {**CONFIG, **config}, model=model, callbacks=[callback], **given)


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


@torch.no_grad()
def values(trainer: PPOTrainer) -> torch.Tensor:
    mask = torch.ones(1, 3, dtype=torch.bool)
    ones = torch.ones_like(LOGIT_IDS)
    return trainer.model(input_ids=LOGIT_IDS, attention_mask=ones, completion_mask=mask).values


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=LOGIT_IDS).logits


def train() -> dict:
    """One run per strategy."""
    undisturbed = make("undisturbed")
    undisturbed.train()

    # The base is a local folder, and the push is the user's own.
    tiny_model().save_pretrained(OUT / "base")
    character_tokenizer().save_pretrained(OUT / "base")
    trainer = make("end", model=str(OUT / "base"), push_to_hub=True, hub_strategy="end", hub_model_id="someone/end")
    trainer.train()
    trainer.push_to_hub(tags=["sums"], license="mit")

    make("every_save", push_to_hub=True, hub_strategy="every_save", hub_always_push=True).train()
    make("checkpoint", push_to_hub=True, hub_strategy="checkpoint", hub_always_push=True, stop=6).train()

    trainer = make("all_checkpoints", push_to_hub=True, hub_strategy="all_checkpoints", hub_always_push=True)
    trainer.train()
    trainer.save_model()  # which pushes
    trainer.model.eval()
    prompts = Dataset.from_list([{"prompt": PROMPT, "answer": "7"}])
    return {
        "undisturbed": weights(undisturbed),
        "logits": logits(trainer.model),
        "values": values(trainer),
        "completion": trainer.predict(prompts).predictions[0],
    }


def versions(repo: str) -> dict:
    """What a base of another revision and an adapter of an earlier one give."""
    v2 = {"revision": "v2"}
    trainer = make("on_v2", model_init_kwargs=v2, max_steps=2)
    trainer.model.eval()
    of_v2 = {"base": logits(AutoModelForCausalLM.from_pretrained(BASE, **v2)), "new": logits(trainer.model)}
    trainer.train()
    trainer.save_model()
    folder, kwargs = trainer.args.output_dir, {"trainer": {"peft_config": None}}
    of_v2["trained"] = logits(trainer.model.eval())
    of_v2["again"] = logits(make("again", model=folder, **kwargs).model.eval())
    of_v2["by PEFT"] = logits(AutoPeftModelForCausalLM.from_pretrained(folder).eval())

    config = Path(folder) / "adapter_config.json"
    config.write_text(config.read_text().replace('"revision": "v2"', '"revision": null'))  # as TRL writes it
    unnamed = make("unnamed", model=folder, model_init_kwargs=v2, **kwargs)
    of_v2["unnamed"] = logits(unnamed.model.eval())
    main = AutoModelForCausalLM.from_pretrained(BASE)
    of_loaded = make("loaded", model=main, model_init_kwargs=v2, trainer={"ref_model": BASE}).processing_class

    early = {"revision": "early"}
    of_early = {"by id": logits(make("early", model=repo, model_init_kwargs=early, **kwargs).model.eval())}
    of_early["by PEFT"] = logits(AutoPeftModelForCausalLM.from_pretrained(repo, **early).eval())
    template = trainer.processing_class.chat_template
    templates = {"v2": template, "a loaded model": of_loaded.chat_template}
    named = unnamed.model.peft_config["default"].revision
    return {"logits of v2": of_v2, "logits of early": of_early, "templates": templates, "named": named}


def load() -> dict:
    """What a machine makes of it that has never seen the run; at last the Hub goes down."""
    repo = "someone/all_checkpoints"
    folder = snapshot_download(repo)
    model = AutoPeftModelForCausalLM.from_pretrained(repo).eval()
    text_generation = pipeline("text-generation", model=repo)
    completion = text_generation(PROMPT, max_new_tokens=6, do_sample=False, return_full_text=False)[0]
    block = re.search(r"```python\n(.*?)```", (Path(folder) / "README.md").read_text(), flags=re.DOTALL)[1]
    with redirect_stdout(io.StringIO()) as printed:
        exec(block.replace("…", PROMPT), {})

    by_id = make("by_id", model=repo, trainer={"peft_config": None, "critic": repo}, save_strategy="no")
    by_id.model.eval()
    result = {
        "logits": logits(model),
        "tokens": AutoTokenizer.from_pretrained(repo)(PROMPT)["input_ids"],
        "completion": completion["generated_text"],
        "card's code": printed.getvalue().strip(),
        "values": values(by_id),
        "logits by id": logits(by_id.model),
    }
    by_id.train()
    result["kl"] = [entry["kl_k3"] for entry in by_id.state.log_history if "kl_k3" in entry]

    for name, checkpoint in (("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-3")):
        folder = snapshot_download(f"someone/{name}", allow_patterns=f"{checkpoint}/*")
        resumed = make(f"resumed_{name}")
        resumed.train(resume_from_checkpoint=f"{folder}/{checkpoint}")
        result[f"resumed {name}"] = weights(resumed)

    result |= versions(repo)
    down = make("down", push_to_hub=True, hub_strategy="every_save", stop=4)
    print("ready", flush=True)
    sys.stdin.readline()
    down.train()
    try:
        down.push_to_hub()
    except Exception as error:
        result["error"] = "".join(traceback.format_exception(error))
    return result


if __name__ == "__main__":
    assert constants.ENDPOINT.startswith("http://127.0.0.1:")
    torch.save({"train": train, "load": load}[MODE](), OUT / f"{MODE}.pt")

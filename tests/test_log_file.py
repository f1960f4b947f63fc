"""The log on disk: the log history, whatever a run begins with."""

from helpers.runs import read_log

FOUR_STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def test_the_file_is_the_log_history(make_trainer):
    trainer = make_trainer(FOUR_STEPS)
    trainer.train()
    assert len(trainer.state.log_history) == 5  # and the times at the end
    assert read_log(trainer.args.output_dir) == trainer.state.log_history
    trainer.log({"afterwards": 1.0})
    assert read_log(trainer.args.output_dir) == trainer.state.log_history


def test_a_run_that_goes_on_from_an_earlier_checkpoint_has_no_line_twice(make_trainer):
    make_trainer(FOUR_STEPS).train()
    resumed = make_trainer({**FOUR_STEPS, "max_steps": 6})
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    log = read_log(resumed.args.output_dir)
    assert log == resumed.state.log_history
    assert [e["step"] for e in log if "loss" in e] == [1, 2, 3, 4, 5, 6]


def test_a_new_run_in_an_old_folder_begins_a_new_file(make_trainer):
    make_trainer({"max_steps": 3}).train()
    trainer = make_trainer({"max_steps": 2})
    trainer.train()
    assert [e["step"] for e in read_log(trainer.args.output_dir) if "loss" in e] == [1, 2]


def test_an_evaluation_before_training_leaves_an_old_file_alone(make_trainer, dataset):
    make_trainer({"max_steps": 2}).train()
    trainer = make_trainer(eval_dataset=dataset.select(range(2)))
    before = read_log(trainer.args.output_dir)
    trainer.evaluate()
    assert read_log(trainer.args.output_dir) == before

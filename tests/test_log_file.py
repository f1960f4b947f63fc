"""The log on disk: the log history, whatever a run begins with."""

from helpers.runs import read_log

FOUR_STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


def test_the_file_is_the_log_history_whatever_a_run_begins_with(make_trainer, dataset):
    trainer = make_trainer(FOUR_STEPS)
    trainer.train()
    assert len(trainer.state.log_history) == 5  # and the times at the end
    before = read_log(trainer.args.output_dir)
    assert before == trainer.state.log_history
    other = make_trainer(eval_dataset=dataset.select(range(2)))
    other.evaluate()
    assert read_log(trainer.args.output_dir) == before, "an evaluation before training leaves an old file alone"
    trainer.log({"afterwards": 1.0})
    assert read_log(trainer.args.output_dir) == trainer.state.log_history

    resumed = make_trainer({**FOUR_STEPS, "max_steps": 6})
    resumed.train(resume_from_checkpoint=f"{resumed.args.output_dir}/checkpoint-2")
    log = read_log(resumed.args.output_dir)
    assert log == resumed.state.log_history
    assert [e["step"] for e in log if "loss" in e] == [1, 2, 3, 4, 5, 6], "no line twice"

    anew = make_trainer({"max_steps": 2})
    for _ in range(2):
        anew.train()
        log = read_log(anew.args.output_dir)
        assert log == anew.state.log_history
        assert [e["step"] for e in log if "loss" in e] == [1, 2]

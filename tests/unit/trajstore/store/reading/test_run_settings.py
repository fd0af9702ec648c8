from __future__ import annotations

from trajstore.store.reading.run_attributes import SEED, differing_settings, run_labels

ONE = {"config": {"training": {"seed": 1, "steps": 9}, "optimizer": {"lr": 1e-3}}}


def changed(**sections: dict[str, object]) -> dict[str, object]:
    return {"config": {**ONE["config"], **sections}}


def test_a_setting_that_one_run_does_not_have_is_unset() -> None:
    other = changed(optimizer={"lr": 1e-3, "state_dtype": "float32"})
    assert differing_settings([ONE, other]) == {"config.optimizer.state_dtype": [None, "float32"]}
    assert run_labels([ONE, other], ["a", "b"]) == ["state_dtype=unset", "state_dtype=float32"]
    null = changed(optimizer={"lr": 1e-3, "state_dtype": None})
    assert differing_settings([ONE, null]) == {}, (
        "no setting, or an open one: there is no difference"
    )


def test_labels_are_never_alike() -> None:
    other = changed(training={"seed": 2, "steps": 9})
    assert run_labels([ONE, other], ["a", "b"]) == ["seed=1", "seed=2"]
    assert run_labels([ONE, other, other], ["a", "b", "c"]) == ["seed=1", "b: seed=2", "c: seed=2"]
    assert run_labels([ONE, ONE], ["a", "a"]) == ["a", "a (2)"]
    assert run_labels([ONE, other], ["a", "b"], without={SEED}) == ["a", "b"]


def test_too_much_to_be_read_is_left_to_the_names() -> None:
    other = {"config": {"data": dict.fromkeys("abcde", 1)}}
    assert run_labels([ONE, other], ["a", "b"]) == ["a", "b"]


def test_without_configurations_the_optimizer_counts() -> None:
    runs = [{"optimizer": {"hyperparameters": {"eps": eps}}} for eps in (1e-8, 1e-6)]
    assert run_labels(runs, ["a", "b"]) == ["eps=1e-08", "eps=1e-06"]


def test_two_settings_of_one_name_have_their_sections() -> None:
    runs = [
        {"config": {"optimizer": {"name": name}, "schedule": {"name": "linear"}}}
        for name in ("adam", "sgd")
    ]
    assert run_labels(runs, ["a", "b"]) == ["optimizer.name=adam", "optimizer.name=sgd"]

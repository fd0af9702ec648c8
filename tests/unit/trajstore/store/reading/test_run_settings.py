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
    many = {"config": {"data": dict.fromkeys("abcde", 1)}}
    assert run_labels([ONE, many], ["a", "b"]) == ["a", "b"], "too much to be read"


def test_an_optimizer_that_no_configuration_describes_counts() -> None:
    def run(name: str, config: dict[str, str], **rates: object) -> dict[str, object]:
        groups = [{"hyperparameters": rates}]
        return {
            "config": config,
            "optimizer": {"class": name, "hyperparameters": rates, "groups": groups},
        }

    runs = [run("Adam", {}, lr=lr, eps=1e-8) for lr in (1e-3, 1e-2)]
    assert run_labels(runs, ["a", "b"]) == ["lr=0.001", "lr=0.01"]
    runs = [
        run("Adam", {"of": "me"}, lr=1e-3, eps=1e-8, beta1=0.9, beta2=0.9, fused=True),
        run("SGD", {"of": "me"}, lr=1e-2),
    ]
    assert run_labels(runs, ["a", "b"]) == ["class=Adam, lr=0.001", "class=SGD, lr=0.01"]


def test_two_settings_of_one_name_have_their_sections() -> None:
    runs = [
        {"config": {"optimizer": {"name": name}, "schedule": {"name": "linear"}}}
        for name in ("adam", "sgd")
    ]
    assert run_labels(runs, ["a", "b"]) == ["optimizer.name=adam", "optimizer.name=sgd"]

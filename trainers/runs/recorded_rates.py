"""Check that the stretches of a run can be trained again, from its learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trajstore.errors import NothingToResume
from trajstore.store.metadata.stretches import Stretch
from trajstore.store.reading.open_group import open_group
from trajstore.store.storage.remote_path import Location
from trajstore.trainers.config import RunConfig
from trajstore.trainers.runs.optimizer import learning_rate

__all__ = ["check_rates"]


def check_rates(run: Location, stretches: Sequence[Stretch]) -> None:
    """Check that the recorded learning rates follow from the configurations.

    With a gradient scaler the schedule pauses at skipped steps, so such runs are not checked.

    Raises
    ------
    NothingToResume
        If a rate differs. Such a run was extended before runs listed their stretches.
    """
    group: Any = open_group(run)
    if "lr" not in group or not stretches:
        return
    steps = np.asarray(group["step"][...])
    rates = np.asarray(group["lr"][...])
    for stretch in stretches:
        config = RunConfig.of_run(stretch.config)
        if config.training.autocast == "float16":
            continue
        rate = learning_rate(config)
        for row in np.flatnonzero((steps > stretch.first) & (steps <= stretch.last)):
            expected, recorded = rate(int(steps[row]) - 1), float(rates[row])
            if recorded != expected:
                raise NothingToResume(
                    f"the steps of {run} cannot be trained again: at step {steps[row]} the "
                    f"learning rate was {recorded:.6g}, but the configuration gives "
                    f"{expected:.6g}; the run was extended by a version that did not record the "
                    "configuration of each stretch, so use a step with a checkpoint, or record "
                    "the run again"
                )

"""Random loops: each is the same for the same seed."""

from __future__ import annotations

import random

from .loop import STEPS, Situation

FIRST = {
    "freeze": "freeze", "discard": "pass zero", "discard zeros": "pass zeros",
    "outside": "outside", "outside data": "outside:data", "put": "put", "aux first": "pass:aux",
}  # fmt: skip
AFTER = {
    "gather": "gather zero {} gather use", "aux last": "pass:aux", "others": "others",
    "probe": "probe", "aside": "aside pass back", "aside clip": "aside pass back",
}  # fmt: skip
LAST = {
    "clip": "clip", "aside clip": "clip", "value": "value", "hand": "hand", "data": "data",
    "clone": "clone", "third": "third", "noise": "noise", "decay": "decay", "mask": "mask",
    "drop": "drop", "rate": "rate", "*8": "hand:0.125", "fails": "fails",
}  # fmt: skip
"""Words before the passes, after them, and after the division by a scaler, by mood."""
FLAGS = ("observed", "twice", "assigned", "parts")
MOODS = sorted({*FIRST, *AFTER, *LAST, *FLAGS, "plain", "clip between"})
OWN = ("clipping", "noam", "data", "bare", "holding", "noisy")
OPTIMIZERS = ("adamw", "sgd", "adam", "halving", "fused", *OWN)
HOOKS = ("",) * 6 + ("hook:noise", "hook:clip", "hook:turn", "hook:global")
FRAMES = ("zero {} step", "zero {} step", "zeros {} step", "{} step zero", "{} step zeros")


def drawn(seed: int) -> Situation:
    """Return a loop of five steps with moods, accumulation, zeroing, scaler, hook and optimizer."""
    draw = random.Random(seed)
    optimizer, frame, hook = draw.choice(OPTIMIZERS), draw.choice(FRAMES), draw.choice(HOOKS)
    scaler = "" if optimizer in OWN else draw.choice(["", "", "", "given", "found"])
    usual = draw.choice([["plain"], ["plain", "clip"], ["clip", "no zero"], ["halves"], None, None])
    steps = []
    for _ in range(STEPS):
        moods = {*(usual or draw.sample(MOODS, draw.choice([1, 1, 2, 3])))}
        if scaler:
            moods -= {"fails"}
        text = frame.format(words_of(moods, draw, unscales=bool(scaler) and draw.random() < 0.5))
        if "no zero" in moods and draw.random() < 0.4:
            text = text.replace("zeros", "").replace("zero", "")
        steps.append(text + " thaw" * ("freeze" in moods))
    return Situation(f"drawn/{seed}", " | ".join(steps), optimizer, scaler, once=hook)


def words_of(moods: set[str], draw: random.Random, *, unscales: bool) -> str:
    """Return the words between zeroing and step."""
    count = draw.choice([1, 1, 1, 2, 3])
    flags = [flag for flag in FLAGS if flag in moods][:1] + ["*8"] * ("*8" in moods)
    if draw.random() < 0.5 or "halves" in moods:
        flags.append(f"/{count}")
    one = f"pass:{','.join(flags)}" if flags else "pass"
    passes = (" clip " if "clip between" in moods else " ").join([one] * count)
    first, after, last = (
        [word for mood, word in table.items() if mood in moods] for table in (FIRST, AFTER, LAST)
    )
    return " ".join([*first, passes, *after, *["unscale"] * unscales, *last]).format(passes)

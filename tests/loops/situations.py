"""The table of situations: products of a few axes, loops that stand alone, and random ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

from .loop import STEPS, Checkpointed, Reentrant, Returning, Situation

BODIES = {
    "plain": "pass", "clip": "pass ~ clip", "loose-clip": "pass ~ clip:100",
    "clip-to-0": "pass ~ clip:0", "clip-twice": "pass ~ clip:0.1 clip", "value": "pass ~ value",
    "value-then-clip": "pass ~ value clip", "hand": "pass ~ hand",
    "hand-then-clip": "pass ~ hand clip", "clip-then-hand": "pass ~ clip hand",
    "data": "pass ~ data", "clip-then-data": "pass ~ clip data", "noise": "pass ~ noise",
    "clip-then-noise": "pass ~ clip noise", "mask": "pass ~ mask", "clone": "pass ~ clone",
    "clone-then-clip": "pass ~ clone clip", "third": "pass ~ third", "decay": "pass ~ decay",
    "decay-then-clip": "pass ~ decay clip", "put": "put pass", "halves": "pass:/2 pass:/2",
    "halves-clip": "pass:/2 pass:/2 ~ clip", "sum": "pass pass pass ~ clip",
    "sum-then-third": "pass pass pass ~ third", "uneven": "pass:/3 pass:/3",
    "same-factor": "pass:*0.5 pass:*0.5 pass:*0.5",
    "times-20": "pass:*20 pass:*20 pass:*20 ~ clip", "multiplied": "pass:*8 ~ hand:0.125",
    "penalty-first": "pass:aux pass", "penalty-last": "pass pass:aux ~ clip",
    "clip-between": "pass clip pass", "aside": "pass aside pass back",
    "aside-clip": "pass ~ aside pass back clip", "surgery": "pass gather zero pass gather use",
    "surgery-clip": "pass clip gather zero pass clip gather use ~ clip",
    "pgd": "pass aside:copies perturb zero pass perturb back pass restore:assign",
    "discard": "pass zero pass ~ clip", "discard-zeros": "pass zeros pass", "twice": "pass:twice",
    "parts": "pass:parts ~ clip", "parts-halves": "pass:parts,/2 pass:parts,/2",
    "assigned": "pass:assigned", "assigned-clip": "pass:assigned ~ clip",
    "assigned-halves": "pass:assigned,/2 pass:assigned,/2", "observed": "pass:observed ~ clip",
    "observed-halves": "pass:observed,/2 pass:observed,/2",
    "observed-quotient": "pass:/2,observed pass:/2,observed", "observed-later": "pass:later",
    "observed-discard": "pass:observed zero pass:observed",
    "observed-assigned": "pass:assigned,observed ~ clip",
    "others": "pass others probe evaluate ~ clip", "drop": "pass ~ drop",
    "drop-clip": "pass ~ drop clip", "drop-matrix": "pass ~ drop:0", "erase": "pass ~ erase",
    "outside": "outside pass", "outside-after-pass": "pass outside:data ~ clip",
    "perturbed": "pass perturb zero pass restore ~ clip", "moved-back": "pass perturb restore",
}  # fmt: skip
"""Words between zeroing and step; a scaler divides the gradients at the mark ~, or at the end."""

FRAMES = {
    "none": "zero {} step", "zeros": "zeros {} step", "end": "{} step zero",
    "end-zeros": "{} step zeros",
}  # fmt: skip

MAIN = ("sgd", "fused", "data", "halving")
OWN = (
    "plain-sgd", "adam", "rmsprop", "clamping", "noisy", "clearing-clip", "bare", "holding",
    "scratch", "wrapper", "clipping", "noam", "retrying", "lookahead",
)  # fmt: skip
FEW = ("plain", "clip", "halves-clip", "discard")
SCALED = (
    "plain", "clip", "value", "hand-then-clip", "noise", "halves-clip", "sum", "discard",
    "assigned-clip", "observed", "clone-then-clip", "aside-clip", "penalty-first",
)  # fmt: skip
WHEN = (("before", "adamw"), ("once", "halving"))
HOOKS = ("noise", "clip", "value", "hand", "turn", "global", "rate")


def body(name: str, *, unscale: bool = False) -> str:
    text = BODIES[name]
    if unscale:
        return text.replace("~", "unscale") if "~" in text else f"{text} unscale"
    return text.replace("~ ", "")


def products() -> Iterator[Situation]:
    for number, name in enumerate(BODIES):  # with every second optimizer but the usual one
        for optimizer in ("adamw", *MAIN[number % 2 :: 2]):
            yield Situation(f"{name}/{optimizer}", FRAMES["none"].format(body(name)), optimizer)
    for name, frame in product([*FEW, "twice", "aside-clip", "value"], FRAMES):
        if frame != "none":
            yield Situation(f"{name}/{frame}", FRAMES[frame].format(body(name)), "adamw")
    for name, (scaler, optimizer), unscale in product(
        SCALED, (("given", "adamw"), ("given", "fused"), ("found", "fused")), (True, False)
    ):
        text = FRAMES["none"].format(body(name, unscale=unscale))
        ending = f"{scaler}-{optimizer}{'-unscaled' if unscale else ''}"
        yield Situation(f"{name}/{ending}", text, optimizer, scaler)
    for optimizer, name in product(OWN, FEW):
        yield Situation(f"{optimizer}/{name}", FRAMES["none"].format(body(name)), optimizer)
    for hook, name, (when, optimizer) in product(HOOKS, FEW, WHEN):
        text, given = FRAMES["none"].format(body(name)), {when: f"hook:{hook}"}
        yield Situation(f"hook-{hook}/{name}-{when}-{optimizer}", text, optimizer, **given)


PLAIN, USUAL = "zero pass step", "zero pass clip step"
ALONE = {
    "no-zero": "pass step", "no-zero-at-times": "zero pass step | pass step",
    "nan": "zero pass step | zero pass:*nan step", "again": "zero pass step step",
    "no-gradient": "zero pass step zero step",
    "no-pass": "zeros step zero pass step",
    "frozen": "zero pass step | zero freeze pass clip step thaw",
    "frozen-first": "zero freeze pass step thaw | zero pass step", "fails": "zero pass fails step",
    "fails-after-clip": "zero pass clip fails step",
    "fails-discard": "zero pass fails zero pass step", "rate": "zero pass rate step",
    "rate-after-step": "zero pass step rate",
    "rate-0": "rate:0 zero pass step rate:0.01 | zero pass step",
    "setting": "zero pass setting step", "reload": f"reload rate {USUAL}",
    "clear": f"{USUAL} | clear {USUAL}", "twin": f"{USUAL} | {USUAL} twin",
    "add": f"{USUAL} | {USUAL} add | {USUAL} | {USUAL} | {USUAL}",
    "move": f"{USUAL} | {USUAL} move | {USUAL} | {USUAL} | {USUAL}",
    "outside-in-middle": f"{USUAL} | {USUAL} | outside:data {USUAL} | {USUAL} | {USUAL}",
}  # fmt: skip
CALLS = {
    "collecting": (("collecting", "collecting-data"), {
        "accumulated": "pass step pass step zero", "clip": "pass clip step pass step zero",
        "again": "zero pass step step", "halves": "pass:/2 step pass:/2 step zero",
    }),
    "sometimes": (("sometimes",), {
        "plain": "zero pass step", "end": "pass step zero", "no-zero": "pass clip step",
    }),
    "closure": (("adamw", "sgd", "fused", "lbfgs"), {
        "plain": "closure", "clip": "closure:clip", "rate": "closure:rate",
    }),
    "assigned-closure": (("sgd", "fused"), {"plain": "closure:assigned"}),
    "sam": (("sam",), {
        "plain": "zero pass first_step zero pass step",
        "clip": "zero pass first_step zero pass clip step",
        "halves": "zero pass:/2 pass:/2 first_step zero pass:/2 pass:/2 step",
    }),
    "in-turn": (("two", "two-matrix-first"), {
        "usual": "zero pass step:0 step:1", "turned": "zero pass step:1 step:0",
        "pass-between": "zero pass step:0 pass step:1",
        "own-passes": "zero pass step:1 zero pass step:0",
    }),
    "in-backward": (("each",), {
        "plain": "pass row", "half": "pass:/2 row", "others": "pass row others",
    }),
    "early-bound": (("adamw", "halving", "data", "wrapper", "clipping", "noam", "fused"), {
        "clip": USUAL,
    }),
    "replace": (("adamw", "sgd", "data", "wrapper"), {
        name: f"{PLAIN} | {PLAIN} | replace:{how} {PLAIN} | {PLAIN} | {PLAIN}"
        for name, how in (("lost", ""), ("given", "given"), ("all-lost", "all"),
                          ("all-given", "all,given"))
    }),
}  # fmt: skip
"""Kinds of calls: optimizers, and programs by name."""
BEFORE = {"in-backward": "each", "early-bound": "early"}
SKIPS = {
    "second": "zero pass step | zero pass:*inf step",
    "first": "zero pass:*inf step | zero pass step",
    "unscaled": "zero pass unscale clip step | zero pass:*inf unscale clip step",
    "accumulated": "zero pass:/2 pass:/2 step | zero pass pass:*inf step",
    "step-without-it": "zero pass plain", "halves-without-it": "zero pass:/2 pass:/2 plain",
}  # fmt: skip


def alone() -> Iterator[Situation]:
    for (name, text), optimizer in product(ALONE.items(), ("adamw", "sgd", "fused", "wrapper")):
        if optimizer != "wrapper" or name != "reload":
            yield Situation(f"{name}/{optimizer}", text, optimizer)
    for name in ("rate-0", "no-gradient", "again", "frozen", "frozen-first"):
        for optimizer in ("data", "bare", "holding", "noam"):
            yield Situation(f"{name}/{optimizer}", ALONE[name], optimizer)
    for kind, (optimizers, programs) in CALLS.items():
        for optimizer, (name, text) in product(optimizers, programs.items()):
            before = BEFORE.get(kind, "")
            yield Situation(f"{kind}/{name}-{optimizer}", text, optimizer, before=before)
    for optimizer, name in product(("two", "two-matrix-first"), FEW):
        yield Situation(f"several/{name}-{optimizer}", FRAMES["none"].format(body(name)), optimizer)
    for net, name in product((Checkpointed, Reentrant, Returning), (*FEW, "observed", "twice")):
        kind = net.__name__.lower()
        yield Situation(f"{kind}/{name}", FRAMES["none"].format(body(name)), net=net)
    yield Situation("schedule/once", f"{USUAL} next", once="schedule")
    for name, before in (("before", "schedule"), ("early", "schedule early")):
        yield Situation(f"schedule/{name}", f"{USUAL} next", before=before)
    for scaler, (name, text) in product(("given", "found"), SKIPS.items()):
        yield Situation(f"scaler/{name}-{scaler}", text, "adamw", scaler)
    limit = {"max_grad_norm": 0.05}
    for name in ("clip", "halves-clip", "plain", "assigned-clip", "hand-then-clip"):
        yield Situation(f"limit/{name}", FRAMES["none"].format(body(name)), options=limit)


MIXED = {
    ("sgd", ""): ("loose-clip", "uneven", "clone-then-clip", "perturbed", "discard-zeros"),
    ("adamw", "found"): ("clip-to-0", "multiplied", "pgd", "drop-clip", "observed-later"),
    ("data", ""): ("clip-then-data", "mask", "clip-between", "decay", "clip"),
    ("halving", ""): ("value", "times-20", "others", "surgery-clip", "third"),
    ("fused", "found"): ("noise", "put", "outside-after-pass", "observed-halves", "parts-halves"),
}
"""Bodies of one loop, a step each, by its optimizer and scaler."""


def mixed() -> Iterator[Situation]:
    for (optimizer, scaler), names in MIXED.items():
        steps = (FRAMES["none"].format(body(name, unscale=bool(scaler))) for name in names)
        yield Situation(f"mixed/{optimizer}", " | ".join(steps), optimizer, scaler)


SITUATIONS = {one.name: one for one in (*products(), *alone(), *mixed())}


CHOSEN = """
mixed/sgd mixed/adamw mixed/data mixed/halving mixed/fused
plain/found-fused clip/given-adamw-unscaled hand-then-clip/given-fused penalty-first/given-adamw
twice/end-zeros assigned-clip/given-fused-unscaled observed-quotient/fused observed-discard/fused
drop-matrix/sgd holding/discard scratch/clip noam/clip retrying/plain lookahead/clip
hook-clip/halves-clip-once-halving hook-global/clip-before-adamw no-gradient/adamw
frozen-first/data fails-after-clip/fused rate-0/data setting/sgd clear/adamw twin/wrapper move/sgd
replace/all-lost-adamw replace/given-data collecting/again-collecting-data nan/adamw
sometimes/end-sometimes closure/plain-lbfgs closure/rate-sgd assigned-closure/plain-sgd
sam/halves-sam in-turn/pass-between-two in-backward/plain-each checkpointed/halves-clip
returning/halves-clip early-bound/clip-halving schedule/early scaler/first-found
scaler/unscaled-given aside/adamw scaler/halves-without-it-found limit/assigned-clip reload/adamw
""".split()
"""Names of the situations of the short tests: each kind of fault shows in one."""


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
WITHOUT_SCALER = ("clipping", "noam", "data", "bare", "holding", "noisy")
DRAWN_OPTIMIZERS = ("adamw", "sgd", "adam", "halving", "fused", *WITHOUT_SCALER)
DRAWN_HOOKS = ("",) * 6 + ("hook:noise", "hook:clip", "hook:turn", "hook:global")
DRAWN_FRAMES = ("zero {} step", "zero {} step", "zeros {} step", "{} step zero", "{} step zeros")


def drawn(seed: int) -> Situation:
    """Return a loop of five steps with moods, accumulation, zeroing, scaler, hook and optimizer."""
    draw = random.Random(seed)
    optimizer, frame = draw.choice(DRAWN_OPTIMIZERS), draw.choice(DRAWN_FRAMES)
    hook = draw.choice(DRAWN_HOOKS)
    scaler = "" if optimizer in WITHOUT_SCALER else draw.choice(["", "", "", "given", "found"])
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

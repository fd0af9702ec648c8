"""The parts of a training from its configuration: model, optimizer, schedule, examples and loop."""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_model
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import get_parameter_names
from transformers.utils import SAFE_WEIGHTS_NAME

from trajstore.errors import ConfigError
from trajstore.trainers.config import InitializationConfig, ModelConfig, RunConfig, ScheduleConfig
from trajstore.trainers.matrix_products import choose_products, float32_products
from trajstore.trainers.recording.capture import Recorder
from trajstore.trainers.recording.examples import EXAMPLE_INDEX
from trajstore.trainers.recording.parameters import JoinedOptimizer
from trajstore.trainers.rounded_optimizer import OPTIMIZERS, RoundedSGD
from trajstore.trainers.states.state import State
from trajstore.trainers.texts import Corpus

Batch = dict[str, torch.Tensor]


class Batches:
    """Endless batches, with a new order in each epoch.

    A separate generator shuffles the examples.

    Parameters
    ----------
    dataset : Dataset of dict of tensors
    batch_size : int
    seed : int
        Seed of the generator.
    skipped_shuffles : int
        Number of orders to discard at the start.
    """

    def __init__(
        self, dataset: Dataset[Batch], batch_size: int, *, seed: int, skipped_shuffles: int = 0
    ) -> None:
        self._dataset = dataset
        self._order: DataLoader[int] = DataLoader(
            range(len(dataset)),  # type: ignore[arg-type]
            batch_size=batch_size,
            shuffle=True,
            generator=torch.Generator().manual_seed(seed),
            collate_fn=list,
        )
        for _ in range(skipped_shuffles):
            next(iter(self._order))
        self._indices: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch: Batch = default_collate([self._dataset[index] for index in self._next_indices()])
        return batch

    def skip(self, batches: int) -> None:
        """Skip the first batches, without loading their examples."""
        for _ in range(batches):
            self._next_indices()

    def _next_indices(self) -> list[int]:
        indices = next(self._indices, None)
        if indices is None:
            self._indices = iter(self._order)
            indices = next(self._indices)
        return indices


def build_model(config: ModelConfig) -> GPT2LMHeadModel:
    """Build GPT-2 without dropout, and convert all weights to one type.

    Weights are drawn in float32 from torch's global generator.
    """
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context,
            n_embd=config.hidden,
            n_layer=config.layers,
            n_head=config.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=config.tied,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    # GPT-2 does not set its kind of loss. With it, the Trainer counts the targets after the shift
    # inside the loss. Otherwise it divides by one target too many per sequence, and the loss and
    # all gradients are 1/128 too small.
    model.loss_type = "ForCausalLM"
    return model.to(getattr(torch, config.dtype))


@torch.no_grad()
def initialize(model: GPT2LMHeadModel, config: InitializationConfig, seed: int) -> None:
    """Set the initial values of the embedding matrix, and then of an untied unembedding.

    ``point``: one random unit vector for all tokens of a matrix plus noise of standard deviation
    ``sigma``; the vector is drawn first. ``normal``: every element is drawn from N(0, sigma²).
    ``default``: the values of `build_model`.

    All values are drawn on the CPU, for any device, in the type of the configuration. Then they are
    rounded to the weights' type.

    Parameters
    ----------
    model : GPT2LMHeadModel
    config : InitializationConfig
    seed : int
        Seed of the run, for ``config.reseed``.
    """
    if config.reseed or config.seed is not None:
        torch.manual_seed(seed if config.seed is None else config.seed)
    if config.kind == "default":
        return
    matrices = [model.get_input_embeddings().weight]
    if model.lm_head.weight is not matrices[0]:
        matrices.append(model.lm_head.weight)
    dtype = getattr(torch, config.dtype)
    for matrix in matrices:
        tokens, hidden = matrix.shape
        if config.kind == "point":
            vector = torch.randn(hidden, dtype=dtype, device="cpu")
            noise = torch.randn(tokens, hidden, dtype=dtype, device="cpu") * config.sigma
            matrix.copy_(vector / vector.norm() + noise)
        else:
            matrix.copy_(torch.randn(tokens, hidden, dtype=dtype, device="cpu") * config.sigma)


def build_optimizer(model: torch.nn.Module, config: RunConfig) -> Optimizer:
    """Build the optimizer of all parameters, in two groups: with and without weight decay.

    Biases and layer norms have no weight decay, as in the Trainer; the embedding has. It is the
    class of `torch.optim`, unless the state has another type or rounding is stochastic.
    """
    settings = config.optimizer
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], ["bias"]))
    parameters = list(model.named_parameters())
    groups = [
        {
            "params": [p for name, p in parameters if name in decayed],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    arguments: dict[str, Any] = {"lr": settings.lr}
    if settings.name == "sgd":
        arguments["momentum"] = settings.momentum
    else:
        arguments |= {"betas": settings.betas, "eps": settings.eps}
    rounded = OPTIMIZERS[settings.name]
    state_dtype = settings.state_dtype or config.model.dtype
    if state_dtype == config.model.dtype and settings.rounding == "nearest":
        return rounded.real_class(groups, **arguments)  # type: ignore[no-any-return]
    return rounded(
        groups,
        **arguments,
        state_dtype=state_dtype,
        rounding=settings.rounding,
        rounding_seed=config.training.seed,
    )


def build_schedule(optimizer: Optimizer, config: ScheduleConfig, steps: int) -> LambdaLR:
    """Build a schedule whose decay ends at optimizer step `steps`; then the rate is constant."""
    if config.name == "constant":
        name = "constant_with_warmup" if config.warmup_steps else "constant"
    else:
        name = config.name
    schedule: LambdaLR = get_scheduler(
        name, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
    if config.name == "cosine":  # the rate would rise again
        schedule.lr_lambdas = [partial(_clamped, factor, steps) for factor in schedule.lr_lambdas]
    return schedule


def learning_rate(config: RunConfig) -> Callable[[int], float]:
    """Return the learning rate as a function of the steps taken before."""
    optimizer = SGD([torch.zeros(1, device="cpu")], lr=config.optimizer.lr)
    schedule = build_schedule(optimizer, config.schedule, config.decay_steps)
    base, factor = schedule.base_lrs[0], schedule.lr_lambdas[0]
    return lambda step: float(base * factor(step))


def _clamped(factor: Callable[[int], float], last: int, step: int) -> float:
    return factor(min(step, last))


class ExampleDataset(Dataset[dict[str, torch.Tensor]]):
    """Every window of a text, with its labels.

    GPT-2's loss shifts labels by one. So labels equal to the inputs train on the next token, and
    labels one ahead on the token after next.

    Parameters
    ----------
    ids : tensor of int64
    context : int
        Tokens of one example.
    target_offset : {1, 2}
    with_index : bool
        Add the index of each example, which the recorder removes from the model's inputs.
    """

    def __init__(
        self, ids: torch.Tensor, context: int, target_offset: int, *, with_index: bool = False
    ) -> None:
        self._ids = ids
        self._context = context
        self._shift = target_offset - 1
        self._with_index = with_index

    def __len__(self) -> int:
        return len(self._ids) - self._context - self._shift + 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        end = index + self._context
        example = {
            "input_ids": self._ids[index:end],
            "labels": self._ids[index + self._shift : end + self._shift],
        }
        return example | (
            {EXAMPLE_INDEX: torch.tensor(index, device="cpu")} if self._with_index else {}
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Training:
    """A seeded training with all its parts.

    Attributes
    ----------
    config : RunConfig
    device : torch.device
    model : GPT2LMHeadModel
        Model on the device.
    optimizer : Optimizer
    schedule : LambdaLR
    scaler : GradScaler or None
        Scaler of the plain loop; the Trainer has its own.
    dataset : ExampleDataset
    batches : Batches or None
        Batches of the plain loop; the Trainer has its own.
    """

    config: RunConfig
    device: torch.device
    model: GPT2LMHeadModel
    optimizer: Optimizer
    schedule: LambdaLR
    scaler: torch.amp.GradScaler | None
    dataset: ExampleDataset
    batches: Batches | None

    def state(
        self, recorder: Recorder, scaler: Any, *, run: str, sources: Mapping[str, str]
    ) -> State:
        """Copy the state after the recorder's step.

        Parameters
        ----------
        recorder : Recorder
        scaler : GradScaler or None
            Scaler of the loop.
        run, sources
            As in `State`.
        """
        taken = self.schedule.last_epoch
        return State.take(
            self.model,
            self.optimizer,
            recorder.step,
            counters={"taken": taken, "scaler": None if scaler is None else scaler.state_dict()},
            run=run,
            rows=recorder.rows,
            config=self.config.model_dump(mode="json"),
            sources=dict(sources),
        )

    def load(self, state: State, scaler: Any) -> None:
        """Set the parts to a state. Rates and other settings are those of the configuration.

        Weights are converted to the types of the model, and the optimizer's state to the types that
        the optimizer loads.

        Parameters
        ----------
        state : State
        scaler : GradScaler or None
            Scaler of the loop.

        Raises
        ------
        FormatError
            If the state belongs to another model.
        """
        named, taken = dict(self.model.named_parameters()), state.counters["taken"]
        state.set_weights(named)
        state.set_kept(named, JoinedOptimizer(self.optimizer))
        for group in self.optimizer.param_groups:
            if group.get("rounding") == "stochastic" and isinstance(self.optimizer, RoundedSGD):
                # Its numbers depend on the count, which SGD does not keep; a replay counts, too.
                for parameter in group["params"]:
                    self.optimizer.state[parameter]["step"] = torch.tensor(
                        float(taken), device="cpu"
                    )
        factors = zip(self.schedule.base_lrs, self.schedule.lr_lambdas, strict=True)
        rates = [base * factor(taken) for base, factor in factors]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        reached = {"last_epoch": taken, "_step_count": taken + 1, "_last_lr": rates}
        self.schedule.load_state_dict(self.schedule.state_dict() | reached)
        if scaler is not None and state.counters["scaler"]:
            scaler.load_state_dict(state.counters["scaler"])
        if self.batches is not None:
            self.batches.skip(state.step * self.config.training.accumulation)

    def run(
        self,
        callbacks: Sequence[TrainerCallback] = (),
        *,
        first_step: int = 0,
        on_begin: Callable[[Any], None] = lambda scaler: None,
        on_step_end: Callable[[Any], bool] = lambda scaler: False,
    ) -> None:
        """Train until the configuration's number of steps is reached.

        Parameters
        ----------
        callbacks : sequence of TrainerCallback
            For the Trainer; the plain loop ignores them.
        first_step : int
            Steps taken before. The Trainer then starts at this position of the data.
        on_begin : callable
            For the Trainer: called with its gradient scaler, or None, before the first step, after
            accelerate has moved the model and before the other callbacks.
        on_step_end : callable
            Called with the gradient scaler, or None, after each step, when everything is ready for
            the next one; training stops if it returns True.
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(float32_products(self.config.training.products == "float32"))
            if self.batches is not None:
                self._run_plain(self.batches, first_step, on_step_end)
                return
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="trajstore-"))
            trainer = Trainer(
                model=self.model,
                args=_training_arguments(self.config, self.device, scratch),
                train_dataset=self.dataset,
                optimizers=(self.optimizer, self.schedule),
                callbacks=[_Steps(on_begin, on_step_end), *callbacks],
            )
            _train_after(trainer, first_step, scratch)

    def _run_plain(
        self, batches: Batches, first_step: int, on_step_end: Callable[[Any], bool]
    ) -> None:
        """Train in a plain PyTorch loop. A step with a gradient overflow is skipped but counts."""
        training, model, scaler = self.config.training, self.model, self.scaler
        optimizer, device = self.optimizer, self.device
        autocast = torch.autocast(
            device.type,
            getattr(torch, training.autocast, torch.bfloat16),
            enabled=training.autocast != "none",
        )
        model.train()
        for _ in range(first_step, training.steps):
            optimizer.zero_grad()
            for _ in range(training.accumulation):
                batch = {name: values.to(device) for name, values in next(batches).items()}
                with autocast:
                    loss = model(**batch).loss / training.accumulation
                (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            if training.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
            if scaler is None:
                optimizer.step()
                self.schedule.step()
            else:
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if scaler.get_scale() >= scale:  # it is smaller after a skipped step
                    self.schedule.step()
            if on_step_end(scaler):
                return


class _Steps(TrainerCallback):
    """Passes the begin and the steps of a Trainer's training on; precedes all other callbacks."""

    def __init__(self, on_begin: Callable[[Any], None], on_step_end: Callable[[Any], bool]) -> None:
        self._on_begin = on_begin
        self._on_step_end = on_step_end

    def on_train_begin(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
        self._on_begin(getattr(optimizer, "scaler", None))

    def on_step_end(
        self, args: Any, state: Any, control: TrainerControl, *, optimizer: Any, **kwargs: Any
    ) -> None:
        if self._on_step_end(getattr(optimizer, "scaler", None)):
            control.should_training_stop = True


def build_training(config: RunConfig, text: Corpus) -> Training:
    """Seed, and build the model, its optimizer and its examples.

    Raises
    ------
    ConfigError
        If the device is missing, or cannot run the configuration.
    """
    device = find_device(config.training.device)
    plain = config.training.loop == "plain"
    if config.training.autocast == "float16" and not plain and device.type != "cuda":
        raise ConfigError(
            "training.autocast = 'float16': the Trainer scales gradients on CUDA only, but this "
            f"run is on {device.type}; set training.loop=plain or training.autocast=bfloat16"
        )
    # The Trainer also seeds Python's generator; checkpoints always store its state.
    random.seed(config.training.seed)
    torch.manual_seed(config.training.seed)
    np.random.seed(config.training.seed)
    model = build_model(config.model)
    initialize(model, config.initialization, config.training.seed)
    model.to(device)
    optimizer = build_optimizer(model, config)
    ids = torch.from_numpy(text.ids)
    dataset = ExampleDataset(
        ids, config.model.context, config.data.target_offset, with_index=config.records_batch
    )
    batches = scaler = None
    if plain:
        if config.training.autocast == "float16":  # its gradients may be rounded to 0
            scaler = torch.amp.GradScaler(device.type)
        batches = Batches(
            dataset,
            config.training.batch_size,
            seed=config.training.seed,
            skipped_shuffles=config.data.skipped_shuffles,
        )
    return Training(
        config=config,
        device=device,
        model=model,
        optimizer=optimizer,
        schedule=build_schedule(optimizer, config.schedule, config.decay_steps),
        scaler=scaler,
        dataset=dataset,
        batches=batches,
    )


def with_products(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return a configuration that says how its products are computed, and why if it was open."""
    training = config.training
    if training.products != "auto":
        return config, None
    names = {config.model.dtype, training.autocast} - {"none"}
    kinds = {getattr(torch, name) for name in names}
    chosen, reason = choose_products(kinds, find_device(training.device))
    note = f"Products of matrices: {chosen}, because {reason}"
    return config.with_values([f"training.products={chosen}"]), note


def find_device(name: str) -> torch.device:
    """Return a device by name; ``auto`` selects the first available of cuda, mps and cpu.

    Raises
    ------
    ConfigError
        If the device is not available.
    """
    usable = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
    }
    if name == "auto":
        return torch.device(next((kind for kind in ("cuda", "mps") if usable[kind]), "cpu"))
    if not usable[name]:
        available = ", ".join(kind for kind, yes in usable.items() if yes)
        raise ConfigError(
            f"training.device = {name!r}: torch finds no such device on this machine; available: "
            f"{available}"
        )
    return torch.device(name)


def _train_after(trainer: Trainer, first_step: int, scratch: str) -> None:
    """Train with a Trainer from a position of its data. Its callbacks restore the state.

    Parameters
    ----------
    trainer : Trainer
    first_step : int
        Steps taken before.
    scratch : str
        Existing folder for temporary files.
    """
    trainer.remove_callback(PrinterCallback)
    if not first_step:
        trainer.train()
        return
    # The Trainer needs a checkpoint: the step, which gives the position in the data, and weights.
    folder = Path(scratch) / f"checkpoint-{first_step}"
    folder.mkdir()
    save_model(trainer.model, str(folder / SAFE_WEIGHTS_NAME))
    size = trainer.args.per_device_train_batch_size
    state = TrainerState(global_step=first_step, train_batch_size=size)
    state.save_to_json(str(folder / TRAINER_STATE_NAME))
    trainer.train(resume_from_checkpoint=str(folder))


def _training_arguments(config: RunConfig, device: torch.device, scratch: str) -> TrainingArguments:
    training = config.training
    return TrainingArguments(
        output_dir=scratch,
        max_steps=training.steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        max_grad_norm=training.max_grad_norm,
        # The optimizer and its schedule are given; these values are only for the Trainer's report.
        learning_rate=config.optimizer.lr,
        lr_scheduler_type=config.schedule.name,
        warmup_steps=config.schedule.warmup_steps,
        bf16=training.autocast == "bfloat16",
        fp16=training.autocast == "float16",
        use_cpu=device.type == "cpu",
        seed=training.seed,
        remove_unused_columns=not config.records_batch,  # the recorder removes the indices
        # The Trainer only trains.
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )

"""Values from the forward passes of a step: loss, logits, mean and spread of the hidden states.

A step may have several micro-batches, each with a forward and a backward pass. `ForwardPasses`
takes the values of each forward pass when its hooks run. It uses those of the passes that the
backward passes of the step went through, when the step ends. A pass that no backward pass goes
through is forgotten with its graph: nothing else refers to it. Values that the loop observes belong
to the forward passes before them, so those of a dropped batch are not used either.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from trajstore.trainers.recording.hooks import ModuleHooks
from trajstore.trainers.recording.parameters import last_layers, makes_logits
from trajstore.trainers.recording.torch_internals import factor_of, in_backward, in_vmap, scale_of

LogitsMode = Literal["last", "mean"]

_LOSS_OF = "trajstore.loss_of"
"""Key of the metadata of a node: the model's loss that it has computed, and as which output."""

_SCALE = "trajstore.scale"
"""Key of the metadata of a node: the factor of a gradient scaler that it has multiplied by."""

_SOURCE = "trajstore.source"
"""Key of the metadata of a node: an object that stands for it after its graph has gone."""

_KEEPING = ("Mul", "Div", "ToCopy", "Clone", "Alias", "View", "Reshape", "Squeeze", "Unsqueeze",
            "Mean", "Sum", "Identity", "_DDPSink")  # fmt: skip
"""Beginnings of the names of nodes that multiply a loss by a number, at most."""

_JOINING = (*_KEEPING, "Add", "Stack", "Cat")
_SAME_FACTOR = 1e-2  # the quotients of losses of 16 bits differ by their rounding
_LONGEST_WAY = 32  # nodes from the root of a backward pass to the model's loss
_MOST_NODES = 256  # between the output of a model and its logits

_OF_LAYERS = re.compile(
    r"mmBackward|mvBackward|dot|linear|convolution|rnn|attention|norm|backward$", re.IGNORECASE
)
"""Found in the names of nodes of layers, and of any code: no logits enter them."""


class ForwardPass:
    """What the hooks of one forward pass have seen."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.head_calls = 0
        self.head_inputs = 0
        self.head_logits: torch.Tensor | None = None
        self.last_layer: torch.nn.Module | None = None
        self.last_node: torch.autograd.graph.Node | None = None
        self._kept: list[tuple[str, Callable[[], None]]] = []

    def keep(self, name: str, deliver: Callable[..., None], *values: Any) -> None:
        """Call a function with the values when the step ends, if the step uses this pass.

        That is left out if the loop has passed other values under the name.
        """
        self._kept.append((name, functools.partial(deliver, *values)))

    def deliver(self, observed: Set[str]) -> None:
        """Call the functions once; values from the loop are `observed` under some names."""
        kept, self._kept = self._kept, []
        for name, call in kept:
            if name not in observed:
                call()


@dataclass(eq=False)
class BackwardPass:
    """A backward pass of the loop that has reached the model.

    Attributes
    ----------
    root : tensor, () or None
        The differentiated value; None if it is not one number.
    scale : tensor, () or None
        Factor of a gradient scaler in it.
    loss : tensor, () or None
        Loss of the model that the root is, or a multiple of it.
    source : object or None
        Equal in two passes if they differentiate multiples of one value.
    is_quotient : bool
        True if the loop has divided or multiplied the value.
    quotient : float
        What the loop has multiplied it by last, if a number on the CPU tells it; otherwise 1.
    passes : list of ForwardPass
        All passes that it went through.
    is_dropped : bool
        True if the loop has discarded its gradients.
    reached : set of int
        Places, in the list of parameters, of those whose gradients it has changed.
    """

    root: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    source: object = None
    is_quotient: bool = False
    quotient: float = 1.0
    passes: list[ForwardPass] = field(default_factory=list)
    is_dropped: bool = False
    reached: Set[int] = frozenset()

    @classmethod
    def of(cls, roots: Sequence[Any], factors: Sequence[torch.Tensor | None]) -> BackwardPass:
        """Return the pass that differentiates the sum of `roots`, each times its factor."""
        if any(not isinstance(root, torch.Tensor) or root.numel() != 1 for root in roots):
            return cls()
        values = [
            # A copy: the loop may change the root in place.
            root.detach().reshape(()) * (1 if factor is None else factor.detach().reshape(()))
            for root, factor in zip(roots, factors, strict=True)
        ]
        value = values[0] if len(values) == 1 else torch.stack(values).sum()
        if len(roots) > 1:
            return cls(root=value, scale=_scale_of(roots[0]))
        node, output = roots[0].grad_fn, roots[0].output_nr
        is_quotient, quotient, loss = False, 1.0, None
        for _ in range(_LONGEST_WAY):
            if node is None or (loss := _loss_of(node, output)) is not None:
                break
            inputs = [one for one in node.next_functions if one[0] is not None]
            if not node.name().startswith(_KEEPING) or len(inputs) != 1:
                break
            if _SCALE not in _metadata(node) and node.name().startswith(("Div", "Mul")):
                quotient = quotient if is_quotient else factor_of(node)
                is_quotient = True
            ((node, output),) = inputs
        source = None if node is None else _metadata(node).setdefault(_SOURCE, object())
        return cls(value, _scale_of(roots[0]), loss, source, is_quotient, quotient)

    def drop(self) -> None:
        """Release all values: the loop has discarded the gradients."""
        self.is_dropped = True
        self.root = self.scale = self.loss = self.source = None
        self.passes, self.reached = [], frozenset()

    @property
    def value(self) -> torch.Tensor | None:
        """The root without the factor of a scaler."""
        return self.root if self.root is None or self.scale is None else self.root / self.scale


def mark_scaled(tensors: Any, scaler: torch.amp.GradScaler) -> None:
    """Remember that a gradient scaler has multiplied tensors by its factor."""
    scale = scale_of(scaler)
    for tensor in _tensors_of(tensors):
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn)[_SCALE] = scale


def _scale_of(root: torch.Tensor) -> torch.Tensor | None:
    """Return the factor of a gradient scaler in a value, or in the parts of a sum."""
    nodes, seen = [root.grad_fn], 0
    while nodes and seen < _LONGEST_WAY:
        node, seen = nodes.pop(0), seen + 1
        if node is None:
            continue
        if _SCALE in _metadata(node):
            scale: torch.Tensor = _metadata(node)[_SCALE]
            return scale
        if node.name().startswith(_JOINING):
            nodes += [one for one, _ in node.next_functions]
    return None


def _metadata(node: torch.autograd.graph.Node) -> dict[str, Any]:
    """Return the values that belong to a node of a graph, which end with it."""
    return node.metadata  # type: ignore[return-value]


def _loss_of(node: torch.autograd.graph.Node, output: int) -> torch.Tensor | None:
    """Return the model's loss that a node has computed as one of its outputs."""
    loss, number = _metadata(node).get(_LOSS_OF, (None, None))
    return loss if number == output else None


class Observation(NamedTuple):
    """Values that the loop has passed for a micro-batch.

    Attributes
    ----------
    number : int
        Number of the first forward pass after it.
    deliver : dict of str to callable
        Called if the step uses the values; by the names of the values.
    """

    number: int
    deliver: dict[str, Callable[[], None]]


@dataclass(kw_only=True, eq=False)
class ForwardPasses:
    """Loss, logits, mean and spread of the hidden states of the optimizer step in progress.

    Parameters
    ----------
    logits_mode : {'last', 'mean'}
        Logits at the last position: of the first sequence, or the mean over the step's sequences.
    vocabularies : iterable of int
        Possible lengths of the last dimension of logits.
    on_use : callable
        Called with a pass when a backward pass reaches it.
    on_note : callable
        Called with a sentence about values that cannot be recorded.

    Attributes
    ----------
    current : ForwardPass or None
        Pass of the model that runs now, if it may be differentiated.
    loss : StepLoss
    autocast_types : set of torch.dtype
        Types that autocast has chosen on the CPU.
    """

    logits_mode: LogitsMode
    vocabularies: InitVar[Iterable[int]]
    on_use: Callable[[ForwardPass], None]
    on_note: Callable[[str], None]

    def __post_init__(self, vocabularies: Iterable[int]) -> None:
        self.current: ForwardPass | None = None
        self.autocast_types: set[torch.dtype] = set()
        self._vocabularies = frozenset(vocabularies)
        self._variables: frozenset[str] = frozenset()
        self._number = 0  # of the next pass
        self.begin_step()

    def begin_step(self) -> None:
        """Discard the values of the previous step."""
        self._events: list[Observation | BackwardPass] = []
        self._first = self._number
        self._watched: set[int] = set()  # passes whose use a backward pass tells
        self.loss = StepLoss()
        self._logits = WeightedMean()
        self._hidden = WeightedMean()
        self._spread: HiddenSpread | None = None

    def release(self) -> None:
        """Forget who is called: graphs of the loop, which refer to this, may live on."""
        self.on_use = lambda one: None
        self.on_note = lambda sentence: None

    def watch(
        self,
        hooks: ModuleHooks,
        model: torch.nn.Module,
        head: torch.nn.Module | None,
        variables: set[str],
    ) -> None:
        """Add the hook on the unembedding, if a variable needs it.

        Parameters
        ----------
        hooks : ModuleHooks
        model : Module
        head : Module or None
            Module that multiplies hidden states by a recorded parameter.
        variables : set of str
        """
        self._variables = frozenset(variables)
        if "logits" in variables and head is not None and makes_logits(model, head):
            hooks.after(head, self._on_head_output)
        elif "logits" in variables:
            for layer in last_layers(model, self._vocabularies):
                hooks.after(layer, self._on_layer_output)

    def watch_model(self, hooks: ModuleHooks, model: torch.nn.Module) -> None:
        """Add the hooks that begin and end a pass; those of others lie between them."""
        hooks.before(model, self._begin, first=True)
        hooks.after(model, self._end, always=True)

    @contextlib.contextmanager
    def of(self, output: Any) -> Iterator[ForwardPass | None]:
        """Yield the pass that a module's output belongs to; None if it is not differentiated.

        A loop may call a module of the model by itself; that is a pass of its own.
        """
        if _is_no_pass() or (self.current is None and not torch.is_grad_enabled()):
            yield None
        elif self.current is not None:
            yield self.current
        else:
            alone = self._new_pass()
            yield alone
            self._watch_graph(alone, output)

    def observe(
        self,
        *,
        loss: torch.Tensor | None,
        logits: torch.Tensor | None,
        others: Mapping[str, Callable[[], None]],
    ) -> None:
        """Use values from the loop in place of those from the hooks, if the step uses their pass.

        `others` deliver further values of the same micro-batch. Several calls may pass different
        values of it.
        """
        deliver = dict(others)
        if loss is not None:
            deliver["loss"] = self.loss.observed(loss)
        if logits is not None:
            deliver["logits"] = functools.partial(self._add_logits, *self._last_logits(logits))
        last = self._events[-1] if self._events else None
        is_other = isinstance(last, Observation) and last.deliver.keys().isdisjoint(deliver)
        if isinstance(last, Observation) and is_other and last.number == self._number:
            last.deliver.update(deliver)
        else:
            self._events.append(Observation(self._number, deliver))

    def end_backward(self, one: BackwardPass) -> None:
        """Take note of the place of a backward pass among the observed values."""
        self._events.append(one)

    def deliver(self, passes: Collection[ForwardPass], used: Set[int]) -> None:
        """Deliver the values of some passes, and the observed ones.

        An observed value is left out if backward passes have gone through the passes `used`, given
        by their numbers, but through none of its own. If its own are not known, its neighbors among
        the backward passes decide.
        """
        observed: set[str] = set()
        observations = [event for event in self._events if isinstance(event, Observation)]
        bounds = [self._first, *(one.number for one in observations), self._number]
        for one, before, end in zip(observations, bounds, bounds[2:], strict=False):
            own = range(before, one.number) or range(one.number, end)
            watched = self._watched.intersection(own)
            if watched & used if used and watched else self._is_next_to_use(one):
                observed |= one.deliver.keys()
                for call in one.deliver.values():
                    call()
        for used_pass in sorted(passes, key=lambda one: one.number):
            used_pass.deliver(observed)

    def _is_next_to_use(self, one: Observation) -> bool:
        """Return True if the backward pass after an observation is used, or that before it.

        It is that before it in a loop that observes after the backward pass.
        """
        events, place = self._events, self._events.index(one)
        after = isinstance(events[0], BackwardPass)
        side = reversed(events[:place]) if after else iter(events[place + 1 :])
        near = list(itertools.takewhile(lambda event: isinstance(event, BackwardPass), side))
        backwards = [event for event in events if isinstance(event, BackwardPass)]
        if not near:  # a pass for each, in another order, or none that was seen
            return not backwards or len(events) <= 2 * len(backwards)
        return not all(event.is_dropped for event in near if isinstance(event, BackwardPass))

    def hidden_part(self, states: torch.Tensor) -> Callable[[], None]:
        """Reduce the hidden states of a micro-batch, (…, hidden); the result adds them."""
        mean, spread = None, None
        count = states[..., 0].numel()
        if "hidden_mean" in self._variables:
            mean = states.mean(dim=tuple(range(states.ndim - 1)), dtype=torch.float32)
        if self._variables & {"hidden_trace", "hidden_cosine"}:
            spread = HiddenSpread.of(states.flatten(0, -2).float())

        def add() -> None:
            if mean is not None:
                self._hidden.add(mean, count)
            if spread is not None:
                self._spread = spread if self._spread is None else self._spread.joined(spread)

        return add

    def values(self, backwards: Sequence[BackwardPass]) -> dict[str, torch.Tensor | None]:
        """Return the values of the current step by variable; None if there is none."""
        spread = self._spread
        return {
            "loss": self.loss.value(backwards),
            "logits": self._logits.mean,
            "hidden_mean": self._hidden.mean,
            "hidden_trace": spread and spread.trace,
            "hidden_cosine": spread and spread.cosine(),
        }

    def _begin(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        counts = torch.is_grad_enabled() and not _is_no_pass()
        if counts and torch.is_autocast_enabled("cpu"):
            self.autocast_types.add(torch.get_autocast_dtype("cpu"))
        self.current = self._new_pass() if counts else None

    def _new_pass(self) -> ForwardPass:
        self._number += 1
        return ForwardPass(self._number - 1)

    def _end(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        one, self.current = self.current, None
        if one is None or output is None:  # the pass has failed
            return
        self._watch_graph(one, output)
        loss, logits = loss_of(output), logits_of(output)
        is_share = kwargs.get("num_items_in_batch") is not None
        if loss is not None and loss.grad_fn is not None and not is_share:
            # A copy: the loop may divide it in place.
            _metadata(loss.grad_fn)[_LOSS_OF] = loss.detach().clone().reshape(()), loss.output_nr
        if one.last_layer is not None and not _ends_in(output, one.last_node):
            one.head_calls = 0
        if one.head_calls == 1 and one.head_logits is not None:
            self._keep_logits(one, _by_sequence(one.head_logits, (args, kwargs)))
        elif self._are_of_a_vocabulary(logits):
            self._keep_logits(one, _by_sequence(logits, (args, kwargs)))
        elif one.head_calls > 1:
            self.on_note(
                f"logits and hidden states are not recorded: the model calls its unembedding "
                f"{one.head_calls} times in a forward pass; pass them with observe(logits=…, "
                "hidden=…)"
            )
        one.head_logits = one.last_layer = one.last_node = None

    def _on_head_output(
        self, head: torch.nn.Module, args: Any, kwargs: Any, output: torch.Tensor
    ) -> None:
        with self.of(output) as one:
            if one is None:
                return
            one.head_calls += 1
            if one is self.current:
                one.head_logits = output.detach()
            else:
                self._keep_logits(one, output)

    def _on_layer_output(self, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Remember the output of the last layer that may make logits; `_end` decides."""
        one = None if _is_no_pass() else self.current
        if one is not None and self._are_of_a_vocabulary(output):
            one.head_calls = one.head_calls + 1 if layer is one.last_layer else 1
            one.last_layer, one.last_node = layer, output.grad_fn
            one.head_logits = output.detach()

    def _keep_logits(self, one: ForwardPass, logits: torch.Tensor) -> None:
        one.keep("logits", self._add_logits, *self._last_logits(logits))

    def _last_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Reduce the logits of a micro-batch, (batch, position, token) or (batch, token)."""
        last = logits.detach()[:, -1] if logits.ndim == 3 else logits.detach()
        # A copy of one row: a view would keep the logits of the whole batch alive.
        return (last.mean(dim=0) if self.logits_mode == "mean" else last[0].clone()), len(last)

    def _add_logits(self, last: torch.Tensor, count: int) -> None:
        if self.logits_mode == "mean" or self._logits.mean is None:
            self._logits.add(last, count)

    def _watch_graph(self, one: ForwardPass, output: Any) -> None:
        """Note when a backward pass goes through an output of the pass."""
        for tensor in _tensors_of(output):
            if tensor.grad_fn is not None:
                self._watched.add(one.number)
                tensor.grad_fn.register_prehook(functools.partial(self._use, one))

    def _use(self, one: ForwardPass, gradients: Any) -> None:
        self.on_use(one)

    def _are_of_a_vocabulary(self, logits: Any) -> TypeGuard[torch.Tensor]:
        shape: Sequence[int] = logits.shape if isinstance(logits, torch.Tensor) else ()
        return len(shape) in (2, 3) and shape[-1] in self._vocabularies


def _is_no_pass() -> bool:
    """Return True where checkpointing repeats a part of a pass, or tensors cannot be kept."""
    return in_backward() or in_vmap()


class StepLoss:
    """Loss of a step from those of its micro-batches.

    Attributes
    ----------
    summands : int
        Number of values in the sum that was returned last; 0 if it was no sum.
    """

    def __init__(self) -> None:
        self.summands = 0
        self._observed: list[torch.Tensor] = []
        self._quotients = 0

    def observed(self, loss: torch.Tensor) -> Callable[[], None]:
        """Return a function that uses the loss of a micro-batch in place of the hooks'."""
        kept = loss.detach().clone().reshape(())
        is_quotient = loss.grad_fn is not None and loss.grad_fn.name() == "DivBackward0"

        def use() -> None:
            self._observed.append(kept)
            self._quotients += is_quotient

        return use

    @property
    def looks_divided(self) -> bool:
        """True if the loop gave several losses, each of them a quotient."""
        return len(self._observed) > 1 and self._quotients == len(self._observed)

    def value(self, backwards: Sequence[BackwardPass]) -> torch.Tensor | None:
        """Return the loss of the current step; None if it is not known.

        It is the mean of the observed losses. Otherwise it is the mean of the model's losses, if
        each backward pass differentiated one of them, all with the same factor. Otherwise it is the
        sum of the roots: the recorded gradient is the gradient of this sum. Passes that
        differentiate one value for different parameters count once.
        """
        if self._observed:
            return _mean(self._observed)
        counted: list[BackwardPass] = []
        for one in backwards:
            same = [other for other in counted if other.source is one.source is not None]
            if not same or any(one.reached & other.reached for other in same):
                counted.append(one)
        roots = [value for one in counted if (value := one.value) is not None]
        if not roots or len(roots) < len(counted):
            return None
        losses = [one.loss for one in counted if one.loss is not None]
        if len(losses) == len(roots) == 1:
            return losses[0]
        total = roots[0] if len(roots) == 1 else torch.stack(roots).sum()
        if len(losses) < len(roots):
            quotients = {one.quotient for one in counted}  # a mean has divided all alike
            if len(roots) > 1 and (len(quotients) > 1 or not all(o.is_quotient for o in counted)):
                self.summands = len(roots)
            return total
        factors = torch.stack(roots).float() / torch.stack(losses).float()
        # Also if a loss is NaN.
        same_factor = ~(factors.max() - factors.min() > _SAME_FACTOR * factors.abs().max())
        if same_factor.device.type == "cpu" and not same_factor:  # a device is not waited for
            self.summands = len(roots)
        return torch.where(same_factor, _mean(losses), total.to(losses[0].dtype))


def _mean(losses: list[torch.Tensor]) -> torch.Tensor:
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


class WeightedMean:
    """Mean of means, weighted by the number of items in each."""

    def __init__(self) -> None:
        self._mean: torch.Tensor | None = None
        self._dtype = torch.float32
        self._count = 0

    def add(self, mean: torch.Tensor, count: int) -> None:
        """Add the mean of `count` items."""
        if self._mean is None:
            self._mean = mean
        else:
            weight = count / (self._count + count)
            self._mean = self._mean + (mean.float() - self._mean) * weight
        self._count, self._dtype = self._count + count, mean.dtype

    @property
    def mean(self) -> torch.Tensor | None:
        """The mean of all items, in the type of those added last; None without items."""
        return None if self._mean is None else self._mean.to(self._dtype)


class HiddenSpread(NamedTuple):
    """Spread of vectors around their mean, and their cosine with the mean, in float32.

    Parts are joined as by Chan, Golub & LeVeque (1983), *Algorithms for computing the sample
    variance*: the spread of the whole is that of the parts plus that of their means.

    Attributes
    ----------
    number : int
    mean : tensor, (hidden,)
    trace : tensor, ()
        Trace of the covariance: mean squared distance from the mean.
    direction : tensor, (hidden,)
        Mean of the vectors at length 1.
    """

    number: int
    mean: torch.Tensor
    trace: torch.Tensor
    direction: torch.Tensor

    @classmethod
    def of(cls, vectors: torch.Tensor) -> HiddenSpread:
        """Return the spread of vectors, (vector, hidden)."""
        mean = vectors.mean(dim=0)
        trace = (vectors - mean).square().sum(dim=1).mean()
        lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
        return cls(len(vectors), mean, trace, (vectors / lengths).mean(dim=0))

    def joined(self, other: HiddenSpread) -> HiddenSpread:
        """Return the spread of these and other vectors."""
        number = self.number + other.number
        weight = other.number / number
        apart = other.mean - self.mean
        between = weight * (1 - weight) * apart.square().sum()
        return HiddenSpread(
            number,
            self.mean + weight * apart,
            self.trace + weight * (other.trace - self.trace) + between,
            self.direction + weight * (other.direction - self.direction),
        )

    def cosine(self) -> torch.Tensor:
        """Return the mean cosine between the vectors and their mean."""
        return torch.dot(self.direction, self.mean / torch.linalg.vector_norm(self.mean))


def _ends_in(output: Any, node: torch.autograd.graph.Node | None) -> bool:
    """Return True if the output of a model follows from that of a node without another layer."""
    nodes = [tensor.grad_fn for tensor in _tensors_of(output)]
    seen: set[torch.autograd.graph.Node] = set()
    while nodes and node is not None and len(seen) < _MOST_NODES:
        if (one := nodes.pop()) is node:
            return True
        if one is not None and one not in seen and not _OF_LAYERS.search(one.name()):
            seen.add(one)
            nodes += [before for before, _ in one.next_functions]
    return False


def _by_sequence(logits: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Return logits as (batch, position, token) if the model has flattened its positions."""
    matrices = (one for one in _tensors_of(inputs) if one.ndim == 2 and not one.is_floating_point())
    ids = next(matrices, None)
    if logits.ndim == 2 and ids is not None and len(logits) == ids.numel():
        return logits.reshape(*ids.shape, -1)
    return logits


def _tensors_of(output: Any) -> list[torch.Tensor]:
    """Return the tensors of a module's output: alone, or in mappings and sequences."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = output.values()
    elif hasattr(output, "__dataclass_fields__"):
        output = vars(output).values()
    elif not isinstance(output, tuple | list):
        return []
    return [tensor for one in output for tensor in _tensors_of(one)]


def loss_of(output: Any) -> torch.Tensor | None:
    """Return the loss of a model's output: by name, first of a tuple, or alone; else None."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, tuple):
        output = output[0] if output else None
    scalar = isinstance(output, torch.Tensor) and output.numel() == 1 and output.ndim <= 1
    return output if scalar and output.is_floating_point() else None


def logits_of(output: Any) -> torch.Tensor | None:
    """Return the possible logits of a model's output; None if there are none."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif isinstance(output, tuple):
        output = next((o for o in output if isinstance(o, torch.Tensor) and o.ndim > 1), None)
    return output if isinstance(output, torch.Tensor) and output.ndim > 1 else None

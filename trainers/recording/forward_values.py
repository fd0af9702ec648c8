"""Values from the forward passes of a step: logits, mean and spread of the hidden states.

A step may have several micro-batches, each with a forward and a backward pass. `ForwardPasses`
takes the values of each forward pass when its hooks run. It uses those of the passes that the
backward passes of the step went through, when the step ends. A pass that no backward pass goes
through is forgotten with its graph: nothing else refers to it.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import InitVar, dataclass
from typing import Any, Literal, NamedTuple, TypeGuard

import torch

from trajstore.trainers.recording.graphs import mark_loss, tensors_of
from trajstore.trainers.recording.hooks import ModuleHooks
from trajstore.trainers.recording.parameters import last_layers, makes_logits
from trajstore.trainers.recording.torch_internals import in_backward, in_vmap

LogitsMode = Literal["last", "mean"]
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


@dataclass(kw_only=True, eq=False)
class ForwardPasses:
    """Logits, mean and spread of the hidden states of the optimizer step in progress.

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
    number : int
        Number of the next pass.
    watched : set of int
        Passes of the step whose use a backward pass tells, by their numbers.
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
        self.number = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Discard the values of the previous step."""
        self.first = self.number
        self.watched: set[int] = set()
        self._logits = WeightedMean()
        self._hidden = WeightedMean()
        self._spread: HiddenSpread | None = None

    def release(self) -> None:
        """Forget who is called: graphs of the loop, which refer to this, may live on."""
        self.on_use = lambda forward: None
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

    def observed_logits(self, logits: torch.Tensor) -> Callable[[], None]:
        """Return a function that uses the logits of a micro-batch from the loop."""
        return functools.partial(self._add_logits, *self._last_logits(logits))

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

    def values(self) -> dict[str, torch.Tensor | None]:
        """Return the values of the current step by variable; None if there is none."""
        spread = self._spread
        return {
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
        self.number += 1
        return ForwardPass(self.number - 1)

    def _end(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        forward, self.current = self.current, None
        if forward is None or output is None:  # the pass has failed
            return
        self._watch_graph(forward, output)
        loss, logits = loss_of(output), logits_of(output)
        if loss is not None:
            mark_loss(loss, is_share=kwargs.get("num_items_in_batch") is not None)
        if forward.last_layer is not None and not _ends_in(output, forward.last_node):
            forward.head_calls = 0
        if forward.head_calls == 1 and forward.head_logits is not None:
            self._keep_logits(forward, _by_sequence(forward.head_logits, (args, kwargs)))
        elif self._are_of_a_vocabulary(logits):
            self._keep_logits(forward, _by_sequence(logits, (args, kwargs)))
        elif forward.head_calls > 1:
            self.on_note(
                f"logits and hidden states are not recorded: the model calls its unembedding "
                f"{forward.head_calls} times in a forward pass; pass them with observe(logits=…, "
                "hidden=…)"
            )
        forward.head_logits = forward.last_layer = forward.last_node = None

    def _on_head_output(
        self, head: torch.nn.Module, args: Any, kwargs: Any, output: torch.Tensor
    ) -> None:
        with self.of(output) as forward:
            if forward is None:
                return
            forward.head_calls += 1
            if forward is self.current:
                forward.head_logits = output.detach()
            else:
                self._keep_logits(forward, output)

    def _on_layer_output(self, layer: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Remember the output of the last layer that may make logits; `_end` decides."""
        forward = None if _is_no_pass() else self.current
        if forward is not None and self._are_of_a_vocabulary(output):
            forward.head_calls = forward.head_calls + 1 if layer is forward.last_layer else 1
            forward.last_layer, forward.last_node = layer, output.grad_fn
            forward.head_logits = output.detach()

    def _keep_logits(self, forward: ForwardPass, logits: torch.Tensor) -> None:
        forward.keep("logits", self._add_logits, *self._last_logits(logits))

    def _last_logits(self, logits: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Reduce the logits of a micro-batch, (batch, position, token) or (batch, token)."""
        last = logits.detach()[:, -1] if logits.ndim == 3 else logits.detach()
        # A copy of one row: a view would keep the logits of the whole batch alive.
        return (last.mean(dim=0) if self.logits_mode == "mean" else last[0].clone()), len(last)

    def _add_logits(self, last: torch.Tensor, count: int) -> None:
        if self.logits_mode == "mean" or self._logits.mean is None:
            self._logits.add(last, count)

    def _watch_graph(self, forward: ForwardPass, output: Any) -> None:
        """Note when a backward pass goes through an output of the pass."""
        for tensor in tensors_of(output):
            if tensor.grad_fn is not None:
                self.watched.add(forward.number)
                tensor.grad_fn.register_prehook(functools.partial(self._use, forward))

    def _use(self, forward: ForwardPass, gradients: Any) -> None:
        self.on_use(forward)

    def _are_of_a_vocabulary(self, logits: Any) -> TypeGuard[torch.Tensor]:
        shape: Sequence[int] = logits.shape if isinstance(logits, torch.Tensor) else ()
        return len(shape) in (2, 3) and shape[-1] in self._vocabularies


def _is_no_pass() -> bool:
    """Return True where checkpointing repeats a part of a pass, or tensors cannot be kept."""
    return in_backward() or in_vmap()


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
    nodes = [tensor.grad_fn for tensor in tensors_of(output)]
    visited: set[torch.autograd.graph.Node] = set()
    while nodes and node is not None and len(visited) < _MOST_NODES:
        if (current := nodes.pop()) is node:
            return True
        if current is not None and current not in visited and not _OF_LAYERS.search(current.name()):
            visited.add(current)
            nodes += [before for before, _ in current.next_functions]
    return False


def _by_sequence(logits: torch.Tensor, inputs: Any) -> torch.Tensor:
    """Return logits as (batch, position, token) if the model has flattened its positions."""
    matrices = (x for x in tensors_of(inputs) if x.ndim == 2 and not x.is_floating_point())
    ids = next(matrices, None)
    if logits.ndim == 2 and ids is not None and len(logits) == ids.numel():
        return logits.reshape(*ids.shape, -1)
    return logits


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

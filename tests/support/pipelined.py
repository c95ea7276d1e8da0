"""Forward and backward of the model of `parallel_jobs`, over the stages of a pipeline and the lanes within each.

B tokens, of which each lane (a rank of a stage) takes its share; V, D, E as in `parallel_jobs`. A rank gathers the
parameters of its stage, computes on its own tokens, and is left with its part of the gradients of all tokens.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import cross_entropy

from tests.support.parallel_jobs import LAYERS, D, E, Job, V

B = 24


def train(job: Job, steps: int) -> list[float]:
    """Takes steps with the gradients of a loss; returns the losses of all tokens. Collective."""
    losses = []
    for _ in range(steps):
        job.optimizer.zero_grad()
        loss = torch.zeros((), dtype=job.case.dtype)
        if job.place.stage is not None:
            loss += _forward_and_backward(job)
            _add_gradients_of_tied(job)
        if dist.is_initialized():
            dist.all_reduce(loss)
        job.step()
        losses.append(float(loss))
    return losses


def tokens_of(step: int) -> tuple[Tensor, Tensor]:
    """The tokens of a step and those to be predicted, each of shape (B,)."""
    drawn = torch.randint(0, V, (2, B), generator=torch.Generator().manual_seed(step))
    return drawn[0], drawn[1]


def _forward_and_backward(job: Job) -> Tensor:
    """Returns this rank's share of the loss: that of its tokens, on the last stage."""
    place, lanes = job.place, job.place.split.lanes
    ids, targets = (each[place.lane :: lanes] for each in tokens_of(job.app["step"]))
    whole = {name: _gathered(parameter) for name, parameter in job.params.items()}
    inputs = None if place.is_first else torch.empty(len(ids), D, dtype=job.case.dtype)
    if inputs is None:
        hidden = whole["embed.weight"][ids]
    else:
        dist.recv(inputs, place.number - lanes)
        hidden = inputs.requires_grad_()
    for layer in range(LAYERS):
        if f"layers.{layer}.norm.weight" in whole:
            hidden = _layer(whole, f"layers.{layer}", hidden, ids % E)
    if place.is_last:
        logits = (hidden * whole["final.weight"]) @ whole["embed.weight"].T / D**0.5
        loss = cross_entropy(logits, targets, reduction="sum") / B
        loss.backward()
    else:
        dist.send(hidden.detach(), place.number + lanes)
        gradient = torch.empty_like(hidden)
        dist.recv(gradient, place.number + lanes)
        hidden.backward(gradient)
        loss = torch.zeros((), dtype=job.case.dtype)
    if inputs is not None:
        dist.send(inputs.grad, place.number - lanes)
    for parameter in job.params.values():
        if isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return loss.detach()


def _layer(whole: Mapping[str, Tensor], name: str, hidden: Tensor, expert: Tensor) -> Tensor:
    """A residual layer: a dense part, and for each token one of the experts; hidden of shape (tokens, D)."""
    normed = hidden * whole[f"{name}.norm.weight"] / D**0.5
    dense = torch.tanh(normed @ whole[f"{name}.up.weight"].T) @ whole[f"{name}.down.weight"].T
    inner = torch.tanh(torch.einsum("thd,td->th", whole[f"{name}.experts.up"][expert], normed))
    return hidden + dense + torch.einsum("tdh,th->td", whole[f"{name}.experts.down"][expert], inner)


def _gathered(parameter: Tensor) -> Tensor:
    """The whole of a parameter; its gradients on the ranks of the stage are parts of a sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.full_tensor(grad_placements=[Partial()] * parameter.device_mesh.ndim)


def _add_gradients_of_tied(job: Job) -> None:
    """Gives the first and the last stage the sum of what each has as the gradient of the tied parameter."""
    place = job.place
    distance = (place.split.stages - 1) * place.split.lanes
    if not distance or not (place.is_first or place.is_last):
        return
    gradient = job.params["embed.weight"].grad
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    other = torch.empty_like(own)
    if place.is_first:
        dist.send(own, place.number + distance)
        dist.recv(other, place.number + distance)
    else:
        dist.recv(other, place.number - distance)
        dist.send(own, place.number - distance)
    own += other

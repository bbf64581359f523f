"""AdamW (Loshchilov & Hutter, arXiv 1711.05101).

Weight decay acts on every matrix, the embedding among them (tied, it is also the lm_head), never
on norms and biases. Its two moments, 8 bytes a weight, can be kept in bf16 or on the host. On a
GPU one kernel of ours (elementwise/adamw_update.py) updates a tensor and clips its gradient on
the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import adamw as functional

from longctx import kernels
from longctx.model.offload import pinned
from longctx.parallel.sharding import local
from longctx.spec.step import SLICE
from longctx.training.run import Run

MOMENTS = ("exp_avg", "exp_avg_sq")


def build(model: nn.Module, run: Run) -> AdamW:
    """Return AdamW over the trained weights of `model`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(groups(trained, run.config.weight_decay), run)


def groups(parameters: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups: decayed matrices, undecayed vectors; none that is empty."""
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    both = ((matrices, weight_decay), (vectors, 0.0))
    return [{"params": group, "weight_decay": decay} for group, decay in both if group]


def by_kernel(p: Tensor) -> bool:
    """Return True if our kernel updates p; it reads moments of any dtype."""
    return p.is_cuda and p.dtype == torch.float32 and kernels.HAS_TRITON


@contextmanager
def fetched(stored: list[Tensor], device: torch.device, dtype: torch.dtype) -> Iterator[Any]:
    """Yield the `stored` state on `device` in `dtype`, and store what the block makes of it."""
    if all(x.device == device and x.dtype == dtype for x in stored):
        yield stored
        return
    copies = [x.to(device, dtype, non_blocking=True, copy=True) for x in stored]
    yield copies
    for x, new in zip(stored, copies, strict=True):
        x.copy_(new, non_blocking=True)


class AdamW(torch.optim.AdamW):
    """AdamW by our kernel on a GPU, else by torch's.

    Its moments are stored as `memory.optimizer_state` says: next to the weights in fp32 or bf16, or
    in pinned host memory ("host"); then they come to the GPU in slices. The update itself is fp32,
    and "host" gives the same bits as "fp32".
    """

    def __init__(self, groups: list[dict[str, Any]], run: Run) -> None:
        beta1, beta2 = run.config.betas
        super().__init__(groups, lr=run.lr, betas=(beta1, beta2))
        self.stored = run.workload.memory.optimizer_state or "fp32"
        # Steps multiply gradients by it, on their device, see clip_gradients: each step has its own
        self.factor: Tensor | None = None
        # First parameter of a group → the tensor that the kernel reads in a step, and its values
        self._rates: dict[Tensor, tuple[Tensor, tuple[float, ...]]] = {}

    def state_names(self, p: Tensor) -> tuple[str, ...]:
        """Return the names of the states of p."""
        return ("step", *MOMENTS)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.count_step()
        self.update()
        return loss

    def count_step(self) -> None:
        """Count one more step of every parameter that has a gradient. At first give all a state of
        zeros, since a resume expects one. Write the step's numbers, which our kernel reads.
        """
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    # On the host: reading it waits for nothing. torch's Adam expects it so
                    state["step"] = torch.zeros(())
                    state |= {name: self._zeros(local(p)) for name in self.state_names(p)[1:]}
                state["step"] += p.grad is not None
            if trained and by_kernel(trained[0]):
                self._rates_at(int(self.state[trained[0]]["step"]), group)

    @torch.no_grad()
    def update(self) -> None:
        """Update every parameter that has a gradient, by a step that is counted."""
        for group in self.param_groups:
            self._update_group(group)

    def _update_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.grad is None:
                continue
            weight, grad, step = local(p).view(-1), local(p.grad).reshape(-1), self.state[p]["step"]
            moments = [self.state[p][name].view(-1) for name in MOMENTS]
            dtype = moments[0].dtype if by_kernel(weight) else torch.float32
            # In slices: a whole embedding's moments from the host would take 4 GiB in 8b
            for start in range(0, len(weight), SLICE):
                at = slice(start, start + SLICE)
                with fetched([x[at] for x in moments], weight.device, dtype) as (m, v):
                    self._change(weight[at], grad[at], m, v, int(step), group)

    def _change(
        self, p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Update p (N,) and its moments m and v (N,)."""
        beta1, beta2 = group["betas"]
        if by_kernel(p):
            update, rates = kernels.adamw_update.adamw_, self._rates_at(step, group)
            update(p, grad, m, v, self.factor, rates, (beta1, beta2), group["eps"])
            return
        if self.factor is not None:
            grad.mul_(self.factor)
        # torch's function counts the step itself
        before = torch.full((), step - 1.0, device=p.device)
        functional.adamw(
            *([p], [grad], [m], [v], [], [before]),
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _rates_at(self, step: int, group: dict[str, Any]) -> Tensor:
        """Return the (3,) tensor of `group` with the numbers of `step`, always the same tensor."""
        first, rates_of = group["params"][0], kernels.adamw_update.rates_of
        values = rates_of(step, group["lr"], group["betas"], group["weight_decay"])
        if first not in self._rates:
            self._rates[first] = torch.empty(3, device=first.device), ()
        rates, written = self._rates[first]
        if values != written:
            for rate, value in zip(rates, values, strict=True):
                rate.fill_(value)  # an argument of the launch: nothing waits for a copy
            self._rates[first] = rates, values
        return rates

    def can_capture_update(self) -> bool:
        """Return True if a CUDA graph of `update` serves every step that `count_step` has counted:
        its kernels stay at their addresses and read nothing of the host.
        """
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        # Muon's stacks are new tensors in each step, and copies from the host are not kernels
        if type(self) is not AdamW or self.stored == "host" or not self.state.keys() >= {*trained}:
            return False
        # A group's tensor has the numbers of one step
        is_one_step = len({int(self.state[p]["step"]) for p in trained}) == 1
        return is_one_step and all(
            type(p.data) is Tensor and by_kernel(p) and p.grad.is_contiguous() for p in trained
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each moment into the memory and dtype in which it is stored."""
        # Torch would first cast all of them to fp32 next to the weights; a full GPU has no room.
        super().load_state_dict(state_dict | {"state": {}})
        weights = [p for group in self.param_groups for p in group["params"]]
        for number, values in state_dict["state"].items():
            p = weights[number]
            self.state[p] = {
                name: torch.tensor(float(x)) if name == "step" else self._zeros(local(p)).copy_(x)
                for name, x in values.items()
            }

    def _zeros(self, p: Tensor) -> Tensor:
        """Return zeros for a moment of p, in the memory where it is stored between steps."""
        if self.stored == "host" and p.is_cuda:
            return pinned(p.numel(), torch.float32).view(p.shape)
        return torch.zeros_like(p, dtype=torch.bfloat16 if self.stored == "bf16" else torch.float32)

"""AdamW (Loshchilov & Hutter, arXiv 1711.05101).

Weight decay acts on every matrix, the embedding among them (tied, it is also the lm_head), never
on norms and biases. Its two moments, 8 bytes a weight, can be kept in bf16 or on the host. On a
GPU one kernel of ours (elementwise/adamw_update.py) updates a tensor and clips its gradient on
the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import adamw as functional

from longctx.kernels import HAS_TRITON
from longctx.model.offload import pinned
from longctx.parallel.sharding import local
from longctx.spec.step import SLICE
from longctx.training.run import Run

MOMENTS = ("exp_avg", "exp_avg_sq")


def build(model: nn.Module, run: Run) -> torch.optim.AdamW:
    """Return AdamW over `model`; its moments are stored as `memory.optimizer_state` says."""
    trained = [p for p in model.parameters() if p.requires_grad]
    beta1, beta2 = run.config.betas
    stored = run.workload.memory.optimizer_state or "fp32"
    decayed_or_not = groups(trained, run.config.weight_decay)
    is_whole = not any(isinstance(p, DTensor) for p in trained)
    if stored == "fp32" and is_whole and not all(by_kernel(p) for p in trained):
        return FusedAdamW(decayed_or_not, lr=run.lr, betas=(beta1, beta2), fused=True)
    return AdamW(decayed_or_not, run.lr, (beta1, beta2), stored)


def groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups: decayed matrices, undecayed vectors; none that is empty."""
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    both: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in both if group["params"]]


def by_kernel(p: Tensor) -> bool:
    """Return True if our kernel updates p."""
    return p.is_cuda and p.dtype == torch.float32 and HAS_TRITON


class FusedAdamW(torch.optim.AdamW):
    """AdamW by torch's kernels; it can name the states of a weight."""

    def state_names(self, p: Tensor) -> tuple[str, ...]:
        """Return the names of the states of p."""
        return ("step", *MOMENTS)


class AdamW(FusedAdamW):
    """AdamW by our kernel on a GPU, else by torch's.

    Its moments are `stored` next to the weights in fp32 ("fp32") or bf16 ("bf16"), or in pinned
    host memory ("host"); then they come to the GPU in slices. The update itself is fp32, and "host"
    gives the same bits as "fp32".
    """

    def __init__(
        self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], stored: str
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas)
        self.stored = stored
        # The next step multiplies gradients by it, on their device: see clip_gradients
        self.factor: Tensor | None = None
        # First parameter of a group → the tensor that the kernel reads in a step, and its values
        self._rates: dict[Tensor, tuple[Tensor, tuple[float, ...]]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update_group(group)
        self.factor = None
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            if p.grad is not None and local(p).numel():
                state = self._counted(p, MOMENTS)
                self._update(local(p), local(p.grad), state, group)

    def _counted(self, p: Tensor, names: Iterable[str]) -> dict[str, Any]:
        """Count one more step of p; return its state, with zeros for the `names` it lacks."""
        state = self.state[p]
        # On the host: reading it waits for nothing. torch's Adam expects it of every state
        state["step"] = torch.tensor(1.0 + (int(state["step"]) if state else 0))
        for name in names:
            if name not in state:
                state[name] = self._zeros(local(p))
        return state

    def _update(
        self, p: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        step = int(state["step"])
        in_place = by_kernel(p) and self.stored != "host"
        # Moments from the host come in slices: a whole embedding's would take 4 GiB in 8b
        size = p.numel() if in_place else SLICE
        flat, grad = p.view(-1), grad.reshape(-1)
        for start in range(0, p.numel(), size):
            at = slice(start, start + size)
            stored = [state[name].view(-1)[at] for name in MOMENTS]
            m, v = (
                stored
                if in_place
                else [x.to(p.device, torch.float32, non_blocking=True, copy=True) for x in stored]
            )
            self._change(flat[at], grad[at], m, v, step, group)
            if not in_place:
                for moment, new in zip(stored, (m, v), strict=True):
                    moment.copy_(new, non_blocking=True)

    def _change(
        self, p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]
    ) -> None:
        """Update p (N,) and its fp32 moments m and v (N,)."""
        lr, eps, weight_decay = group["lr"], group["eps"], group["weight_decay"]
        beta1, beta2 = group["betas"]
        if by_kernel(p):
            from longctx.kernels import adamw_update  # needs Triton

            rates = self._rates_at(step, group)
            adamw_update.adamw_(p, grad, m, v, self.factor, rates, group["betas"], group["eps"])
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
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    def _rates_at(self, step: int, group: dict[str, Any]) -> Tensor:
        """Return the (3,) tensor of `group` with the numbers of `step`, always the same tensor."""
        from longctx.kernels import adamw_update  # needs Triton

        first = group["params"][0]
        values = adamw_update.rates_of(step, group["lr"], group["betas"], group["weight_decay"])
        if first not in self._rates:
            self._rates[first] = torch.empty(3, device=first.device), ()
        rates, written = self._rates[first]
        if values != written:
            for rate, value in zip(rates, values, strict=True):
                rate.fill_(value)  # an argument of the launch: nothing waits for a copy
            self._rates[first] = rates, values
        return rates

    def captured_update(self) -> Callable[[], None] | None:
        """Return the launches of a step that `count_step` has counted, for a CUDA graph: they
        update all tensors at their present addresses and read nothing of the host. None if that is
        not possible.
        """
        from longctx.kernels import adamw_update  # needs Triton

        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        # Muon's stacks are new tensors in each step, and copies from the host are not kernels
        if type(self) is not AdamW or self.stored == "host" or self.state.keys() != set(trained):
            return None
        steps = {int(state["step"]) for state in self.state.values()}
        is_plain = all(
            type(p.data) is Tensor and by_kernel(p) and p.grad.is_contiguous() for p in trained
        )
        if len(steps) != 1 or not is_plain:
            return None
        tensors = [
            (*(x.view(-1) for x in (p.data, p.grad, *moments)), self.factor, rates)
            for group in self.param_groups
            for rates, _ in [self._rates[group["params"][0]]]
            for p in group["params"]
            if p.grad is not None and p.numel()
            for moments in [[self.state[p][name] for name in MOMENTS]]
        ]
        betas, eps = (self.param_groups[0][name] for name in ("betas", "eps"))  # equal in all

        def update() -> None:
            for each in tensors:
                adamw_update.adamw_(*each, betas, eps)

        return update

    def count_step(self) -> None:
        """Count one more step of all parameters; write its numbers for the kernel to read."""
        steps = [state["step"] for state in self.state.values()]
        torch._foreach_add_(steps, 1.0)
        for group in self.param_groups:
            self._rates_at(int(steps[0]), group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each moment into the memory and dtype in which it is stored.

        Torch would first cast all of them to fp32 next to the weights; a full GPU has no room.
        """
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

"""sdpa: torch's fused kernels, each pinned by name.

On a GPU: FlashAttention-2 (`aten::_flash_attention_forward`, the kernel under torch's varlen
attention, for packed documents), or cuDNN for whole causal or full sequences if it is right and
faster. On a CPU: torch's fused CPU kernel, document by document, or by tiles of queries. No N×N
mask is ever built.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.attention.description import DESCRIPTIONS
from longctx.attention.mask import Mask
from longctx.attention.registry import AttentionRequest, Backend, register
from longctx.kernels.attention import Scores
from longctx.kernels.attention.tiled import fused, fused_documents

CPU_TILE = 512  # queries


class Sdpa(Backend):
    """`kernel`, for GPUs only: auto (cuDNN if right and faster, else flash), flash or cudnn."""

    description = DESCRIPTIONS["sdpa"]

    def refusal(self, request: AttentionRequest) -> str | None:
        kernel, device = request.options.get("kernel", "auto"), request.device.type
        if device == "cpu":
            needs_gpu = "kernel=cudnn needs a GPU; leave attention.options.kernel=auto"
            return needs_gpu if kernel == "cudnn" else None
        if device != "cuda":
            return f"its kernels are for CUDA GPUs and CPUs, not {device}; use attention=naive"
        if reason := beyond_flash_attention(request):
            return reason
        if kernel == "cudnn" and (reason := _not_cudnn(request)):
            return f"kernel=cudnn {reason}; use attention.options.kernel=flash"
        return None

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scores: Scores, kernel: str = "auto"
    ) -> tuple[Tensor, Tensor, str]:
        assert scores.scale is not None
        scale = scores.scale
        if not q.is_cuda:
            # document lengths are data: the compiler would compile each of them
            is_compiling = torch.compiler.is_compiling()
            on_cpu = torch.compiler.disable(_attend_on_cpu) if is_compiling else _attend_on_cpu
            return *on_cpu(q, k, v, mask, scale), "torch CPU flash"
        deterministic = torch.are_deterministic_algorithms_enabled()
        request = AttentionRequest(q.device, q.dtype, q.shape[3], mask, deterministic=deterministic)
        q, k, v = aligned(q), aligned(k), aligned(v)
        Tq, Tk = q.shape[1], k.shape[1]
        lengths_fit = Tq == Tk and Tq % 128 == 0  # cuDNN is wrong for others: pytorch#196678
        if kernel == "cudnn" and not lengths_fit:
            trusted = f"trusted for Tq = Tk, a multiple of 128, not {Tq} and {Tk}"
            raise ValueError(f"kernel=cudnn is {trusted}; use kernel=flash")
        if kernel != "flash" and lengths_fit and not _not_cudnn(request):
            out, lse, ran = *_cudnn(q, k, v, mask, scale), "cudnn"
        else:
            out, lse, ran = *_flash(q, k, v, mask, scale), "flash-attention-2"
        align_gradient(out)
        return out, lse, ran

    def versions(self) -> dict[str, str]:
        on_gpu = torch.cuda.is_available()
        return {"cudnn": str(torch.backends.cudnn.version())} if on_gpu else {}


def beyond_flash_attention(request: AttentionRequest) -> str | None:
    """Return why neither torch's nor the user's FlashAttention serves the request, or None."""
    dtype, size, mask = request.dtype, request.head_dim, request.mask
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {dtype}; use precision=bf16, or attention=flash"
    if size % 8 or size > 256:
        return f"head size {size} must be a multiple of 8 up to 256; use attention=flash"
    if mask is not None and mask.kind == "intervals":
        taken = "causal, windowed, packed and full masks, not free intervals"
        return f"it takes {taken}; use attention=flash"
    return None


def aligned(x: Tensor) -> Tensor:
    """Return x (B, T, H, D), or a copy if its 16-byte loads would not begin at multiples of 16."""
    # Compiled code aligns its tensors by itself
    if torch.compiler.is_compiling():
        return x
    size, step = x.element_size(), x.stride()
    if any(n * size % 16 for n in (x.storage_offset(), step[0], step[1], step[2])):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def align_gradient(out: Tensor) -> None:
    """Have the backward pass get an `aligned` gradient of `out`."""
    if out.requires_grad and not torch.compiler.is_compiling():
        out.register_hook(aligned)


def _not_cudnn(request: AttentionRequest) -> str | None:
    largest = _largest_head_of_cudnn(request.device)
    if not largest:
        return "is faster on Hopper and later only"
    if request.head_dim % 8 or request.head_dim > largest:
        return f"takes head sizes up to {largest}, not {request.head_dim}"
    if request.deterministic:
        return "adds gradients up in any order, which deterministic=true rules out"
    mask = request.mask
    if mask is not None and (mask.kind not in ("causal", "full") or mask.window is not None):
        return "takes whole causal or full rows, not packed documents or windows"
    return None


def _largest_head_of_cudnn(device: torch.device) -> int:
    """Return the largest head size, as torch has it (pytorch#161210); 0 if this GPU has none."""
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability[0] < 9:
        return 0
    return 256 if capability == (9, 0) and (torch.backends.cudnn.version() or 0) >= 91000 else 128


# Its answer is a constant of compiled code; see registry.py.
_largest_head_of_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    heads = (x.transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, mask.kind == "causal", False, scale=scale
    )
    return out.transpose(1, 2), lse.detach().reshape(q.shape[0], q.shape[2], q.shape[1])


def _flash(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> tuple[Tensor, Tensor]:
    B, Tq, Hq, D = q.shape
    causal = mask.kind != "full"
    left = -1 if mask.window is None else mask.window - 1
    window = dict(window_size_left=left, window_size_right=0 if causal and left >= 0 else -1)
    if mask.kind == "documents":
        flat = (x.reshape(B * Tq, -1, D) for x in (q, k, v))
        layout = mask.offsets, mask.offsets, mask.longest, mask.longest
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *flat, *layout, 0.0, causal and left < 0, False, scale=scale, **window
        )
        return out.reshape(q.shape), lse.detach().reshape(Hq, B, Tq).transpose(0, 1)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, Tq, k.shape[1], 0.0, causal and left < 0, False, scale=scale, **window
    )
    lse = lse.detach()
    # it gives queries that see nothing an lse of +inf
    return out, lse.masked_fill(lse == float("inf"), float("-inf"))


def _attend_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out and lse under any mask, by torch's fused CPU kernel."""
    assert mask.first is not None and mask.last is not None
    outs, lses = [], []
    for b, (qb, kb, vb) in enumerate(zip(q, k, v, strict=True)):
        first, last = mask.first[b % mask.first.shape[0]], mask.last[b % mask.last.shape[0]]
        documents = fused_documents(first, last, k.shape[1])
        parts = []
        if documents is None:
            # windows, and Tq ≠ Tk
            for i in range(0, len(first), CPU_TILE):
                rows = slice(i, i + CPU_TILE)
                parts.append(_cpu_tile(qb[rows], kb, vb, first[rows], last[rows], scale))
        else:
            for start, end, causal in documents:
                keys = slice(start, end) if causal else slice(None)
                parts.append(fused(qb[start:end], kb[keys], vb[keys], scale, causal))
        outs.append(torch.cat([out for out, _ in parts]))
        lses.append(torch.cat([lse.detach().float() for _, lse in parts], 1))
    return torch.stack(outs), torch.stack(lses)


def _cpu_tile(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return out and lse of a tile of queries, with a (queries, keys) bias for its mask."""
    # the keys that any query of the tile sees, one at least
    begin = min(int(first[0]), len(k) - 1)
    end = max(int(last[-1]), begin) + 1
    key = torch.arange(begin, end)
    visible = (key >= first[:, None]) & (key <= last[:, None])
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill(~visible, float("-inf"))
    # 0 · NaN of a query that sees nothing would reach dk and dv
    sees = visible.any(-1)
    queries = torch.where(sees[:, None, None], q, 0)
    out, lse = fused(queries, k[begin:end], v[begin:end], scale, False, bias)
    return torch.where(sees[:, None, None], out, 0), lse.masked_fill(~sees, float("-inf"))


register("sdpa", Sdpa())

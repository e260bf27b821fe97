"""Placement of a model's weights: on one device, or spread, offloaded or sharded if the model is too large."""

import shutil
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tezo.system.errors import RequestError


def stays(model: Any, device: torch.device) -> list[str]:
    """Leaves a loaded model where it is; there is nothing to say of that."""
    del model, device
    return []


@dataclass(frozen=True)
class Placement:
    """A way to place a model.

    Attributes:
        settle: (model, device) -> notices for the user; moves the weights of a loaded model to their place.
        spread: whether accelerate distributes the layers over all devices while loading.
        packed: whether quantised weights support this placement.
    """

    settle: Callable[[Any, torch.device], list[str]] = stays
    spread: bool = False
    packed: bool = True


def _offload(model: Any, device: torch.device, *, disk: bool) -> list[str]:
    try:
        import accelerate
        from accelerate.utils import find_tied_parameters
    except ImportError as error:
        raise RequestError(f"model.placement needs accelerate ({error}); pip install accelerate.") from None
    # accelerate creates an offloaded tensor anew for each forward pass, so tied parameters become separate tensors
    tied = {name for group in find_tied_parameters(model) for name in group}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tied:
            parameter.requires_grad_(False)
    if disk:
        folder = tempfile.mkdtemp(prefix="tezo-offload-")
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        accelerate.disk_offload(model, folder, execution_device=device, offload_buffers=False)
    else:
        accelerate.cpu_offload(model, execution_device=device, offload_buffers=False)
    if not tied:
        return []
    return [f"not trained, because tied weights cannot be trained when offloaded: {', '.join(sorted(tied))}."]


def _shard(model: Any, device: torch.device) -> list[str]:
    """Shards the model with FSDP2: each rank holds a part of every tensor; a block is gathered while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        raise RequestError(
            "model.placement is shards, which needs several processes; start the run with torchrun, or set "
            "model.placement=device."
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    blocks = [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]
    for part in (*blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return []


PLACEMENTS = {
    "device": Placement(),
    "spread": Placement(spread=True),
    "cpu": Placement(partial(_offload, disk=False), packed=False),
    "disk": Placement(partial(_offload, disk=True), packed=False),
    "shards": Placement(_shard, packed=False),
}
"""device: all weights on one device. spread: layers distributed over all devices (accelerate's device_map). cpu, disk:
weights are offloaded, and each layer is loaded to the device only for its forward pass. shards: every rank that
torchrun starts holds a part of each tensor (FSDP2)."""
